package services

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	gocmp "github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
)

// update is for who has changed a table or a controller:
// go test ./services -run TestDesignHasTheGraph -update
var update = flag.Bool("update", false, "write the graph of the node to docs/design.md")

const (
	design     = "../docs/design.md"
	graphBegin = "```text graph of services/node.go\n"
	graphEnd   = "```\n"
)

func testNode(t *testing.T) *Node {
	t.Helper()
	n, err := NewNode(Options{Mode: boot.Machine, Processes: process.New(), Logs: logs.New(io.Discard)})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// after is what each service of the node depends on.
func (n *Node) after() map[string][]string {
	all := map[string][]string{}
	for _, s := range n.graph.Statuses() {
		all[s.ID] = s.DependsOn
	}
	return all
}

// behind is what must be up before a service, directly or not.
func behind(after map[string][]string, id string) map[string]bool {
	all := map[string]bool{}
	for _, other := range after[id] {
		all[other] = true
		maps.Copy(all, behind(after, other))
	}
	return all
}

// flow is what a controller reads and writes.
type flow struct{ reads, writes []string }

// flows are those of the node's controllers, out of what gbctl inspect graph shows.
func (n *Node) flows(t *testing.T) map[string]flow {
	t.Helper()
	var dot bytes.Buffer
	if err := n.runtime.Graph(&dot); err != nil {
		t.Fatal(err)
	}
	all := map[string]flow{}
	for _, m := range regexp.MustCompile(`"(.*)" \[shape=box\]`).FindAllStringSubmatch(dot.String(), -1) {
		all[m[1]] = flow{}
	}
	short := func(typ string) string { name, _, _ := strings.Cut(typ, "."); return name }
	for _, m := range regexp.MustCompile(`"(.*)" -> "(.*?)"`).FindAllStringSubmatch(dot.String(), -1) {
		if f, writes := all[m[1]]; writes {
			f.writes = append(f.writes, short(m[2]))
			all[m[1]] = f
			continue
		}
		f := all[m[2]]
		f.reads = append(f.reads, short(m[1]))
		all[m[2]] = f
	}
	return all
}

// purposes has every controller of a node, and what it does.
func purposes(t *testing.T) (all map[string]string) {
	t.Helper()
	text, err := os.ReadFile("purposes.yaml")
	if err == nil {
		err = yaml.Unmarshal(text, &all)
	}
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// draw is the machine: services in the order in which they can start, then controllers.
func (n *Node) draw(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	after := n.after()
	fmt.Fprintln(&out, "service      starts after")
	order := slices.SortedFunc(maps.Keys(after), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(behind(after, a)), len(behind(after, b))), cmp.Compare(a, b))
	})
	for _, id := range order {
		fmt.Fprintf(&out, "%-12s %s\n", id, cmp.Or(strings.Join(after[id], ", "), "-"))
	}
	fmt.Fprintln(&out, "\ncontroller: what it does\n    what it reads → what it writes")
	flows, does := n.flows(t), purposes(t)
	for _, name := range slices.Sorted(maps.Keys(flows)) {
		fmt.Fprintf(&out, "%s: %s\n    %s → %s\n", name, does[name],
			strings.Join(flows[name].reads, ", "), cmp.Or(strings.Join(flows[name].writes, ", "), "(no resource)"))
	}
	return out.String()
}

func TestDesignHasTheGraph(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(design)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(page), graphBegin)
	drawn, behind, ended := strings.Cut(rest, graphEnd)
	if !found || !ended {
		t.Fatalf("%s has no block that begins with %q", design, graphBegin)
	}
	want := testNode(t).draw(t)
	if drawn == want {
		return
	}
	if !*update {
		t.Fatalf("%s has another graph than the node (go test ./services -run %s -update writes it):\n%s", design, t.Name(), gocmp.Diff(drawn, want))
	}
	if err := os.WriteFile(design, []byte(before+graphBegin+want+graphEnd+behind), 0o644); err != nil {
		t.Fatal(err)
	}
}

// The tables have exactly the services and controllers that a node has.
func TestTablesAreTheNode(t *testing.T) {
	t.Parallel()
	n := testNode(t)
	for what, names := range map[string][2][]string{
		"services":    {slices.Sorted(maps.Keys(dependencies)), slices.Sorted(maps.Keys(n.after()))},
		"controllers": {slices.Sorted(maps.Keys(purposes(t))), slices.Sorted(maps.Keys(n.flows(t)))},
	} {
		if diff := gocmp.Diff(names[0], names[1]); diff != "" {
			t.Errorf("%s of the table (-) and of the node (+): %s", what, diff)
		}
	}
}

func TestS096NetworkComesBeforeClockKubeletAndEtcd(t *testing.T) {
	t.Parallel()
	after := testNode(t).after()
	for _, id := range []string{"timed", "kubelet", "etcd"} {
		if !slices.Contains(after[id], "networkd") {
			t.Errorf("%s starts after %q, without networkd", id, after[id])
		}
	}
}

func TestS239KubeletAndEtcdWaitForContainerdNetworkAndClock(t *testing.T) {
	t.Parallel()
	after := testNode(t).after()
	for _, id := range []string{"kubelet", "etcd"} {
		for _, other := range []string{"containerd", "networkd", "timed"} {
			if !slices.Contains(after[id], other) {
				t.Errorf("%s starts after %q, without %s", id, after[id], other)
			}
		}
	}
}

// The kubelet needs no control plane, and comes up while etcd waits for the cluster to be
// begun. The services here do nothing, but depend on each other as a node's do.
func TestS244KubeletIsUpWhileEtcdIsNot(t *testing.T) {
	t.Parallel()
	after := testNode(t).after()
	synctest.Test(t, func(t *testing.T) {
		var all []dag.Service
		for id, others := range after {
			all = append(all, dag.Service{ID: id, DependsOn: others, Run: func(ctx context.Context, h *dag.Handle) error {
				if id != "etcd" {
					h.Started("up")
				}
				<-ctx.Done()
				return nil
			}})
		}
		g, err := dag.New(dag.Options{}, all...)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- g.Run(ctx) }()
		synctest.Wait()
		var not []string
		for _, s := range g.Statuses() {
			if !s.Up {
				not = append(not, s.ID)
			}
		}
		if !slices.Equal(not, []string{"etcd", "vip"}) {
			t.Errorf("not up while etcd isn't: %q, want etcd and vip alone", not)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestS275ControllersHaveTheirNames(t *testing.T) {
	t.Parallel()
	all := testNode(t).flows(t)
	for _, name := range []string{
		"secrets.EtcdController", "config.MachineTypeController", "k8s.ManifestApplyController", "v1alpha1.BootstrapStatusController",
		"v1alpha1.TimeStatusController", "k8s.KubeletStaticPodController", "secrets.KubernetesController",
	} {
		if _, there := all[name]; !there {
			t.Errorf("there is no controller %s", name)
		}
	}
}
