//go:build e2e

package bench

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	budgetReady   = 8500 * time.Millisecond // power-on → node Ready
	budgetAPI     = 5 * time.Second         // kernel start → API answers, emulated
	budgetPSS     = 62e6                    // bytes of memory of PID 1 and its helpers, idle
	budgetWeight  = 800e6                   // bytes of memory of a one-node control plane, all processes, idle
	budgetIdle    = 25                      // percent of one processor that an idle control plane uses
	budgetVersion = 30 * time.Millisecond
	budgetPatch   = 25 * time.Millisecond
	// patchLimit is when the static pod isn't waited for any more.
	patchLimit = time.Second

	// controlPlaneMiB is the memory in which a one-node control plane has to run.
	controlPlaneMiB = 2048
	versionRuns     = 21
	patchRuns       = 5

	// settle is how long a node that just came up is left alone before its memory is read.
	settle = 20 * time.Second
	// idleTime is how long the processor time of an idle node is counted: as long as the
	// longest period of its services.
	idleTime = time.Minute
)

// upLine is a service that has just come up.
var upLine = regexp.MustCompile(`^([a-z]+): \S+ \(up\)`)

// node boots one fresh node, and reads when it reached what. The console has times since the kernel's start, or since
// PID 1's in a container.
func node(b *testing.B, provisioner string) (c *e2etest.Cluster, how string) {
	b.Helper()
	boots(b, provisioner)
	c, m := e2etest.Ready(b, "bench-"+provisioner, provisioner, func(o *qemu.Options) { o.MemoryMiB = controlPlaneMiB })
	how = c.Provisioner
	if c.Accelerator != "" {
		how += " (" + c.Accelerator + ")"
	}
	seen := map[string]bool{}
	for i, line := range c.Lines(0) {
		what := "init"
		if up := upLine.FindStringSubmatch(line.Text); up != nil {
			what = up[1]
		} else if i > 0 {
			continue
		}
		var budget []time.Duration
		if provisioner == qemu.QEMU && what == "apid" {
			budget = append(budget, budgetAPI)
		}
		if !seen[what] {
			report(b, of(seconds, how+": kernel start → "+what, line.At, budget...))
		}
		seen[what] = true
	}
	if !seen["apid"] {
		b.Error("apid didn't come up")
	}
	for _, step := range m.Steps[1:] { // the first is that the power is on
		var budget []time.Duration
		if provisioner == qemu.Container && step.What == qemu.MilestoneReady {
			budget = append(budget, budgetReady)
		}
		report(b, of(seconds, how+": power-on → "+step.What, step.After, budget...))
	}
	return c, how
}

// chart prints the chart of the boot, and saves it as a picture.
func chart(b *testing.B, c *e2etest.Cluster, how string) {
	b.Helper()
	picture, err := os.Create("../../../out/boot-chart-" + c.Provisioner + ".svg")
	if err == nil {
		_, err = picture.WriteString(c.Gbctl("boot-chart", "--svg"))
	}
	if err == nil {
		err = picture.Close()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Logf("%s:\n%sas a picture: %s\n", how, c.Gbctl("boot-chart"), strings.TrimPrefix(picture.Name(), "../../../"))
}

// idle is what PID 1 and its helpers take, and what the whole node takes, when nobody asks it for anything.
func idle(b *testing.B, c *e2etest.Cluster) {
	b.Helper()
	b.Logf("letting the node settle for %s, and counting its processor time for %s", settle, idleTime)
	<-time.After(settle)
	used := func() time.Duration {
		all, err := c.NodeCPUTime(c.Node())
		if err != nil {
			b.Fatal(err)
		}
		return all
	}
	before, began := used(), time.Now()
	<-time.After(idleTime)
	share := 100 * float64(used()-before) / float64(time.Since(began))
	var total int64
	for _, helper := range []string{"--mode=container", "apid", "trustd"} {
		total += pss(b, c.NodeInit(c.Node(), helper))
	}
	report(b,
		of(megabytes, "PID 1, apid and trustd, idle, proportional set size", total, budgetPSS),
		weight(b, c, c.Nodes[0], "a one-node control plane", budgetWeight),
		of(func(share float64) string { return fmt.Sprintf("%.1f %% of a processor", share) }, "processor time of a one-node control plane, idle", share, budgetIdle))
}

// weight is what all processes of a node take: those of Garboard, of Kubernetes and of the
// pods that it begins with.
func weight(b *testing.B, c *e2etest.Cluster, n qemu.Node, what string, budget ...int64) figure {
	b.Helper()
	pids, err := c.NodeProcesses(n.Name)
	if err != nil {
		b.Fatal(err)
	}
	var total int64
	for _, pid := range pids {
		total += pss(b, pid)
	}
	return of(megabytes, fmt.Sprintf("memory of %s, all %d processes, proportional set size", what, len(pids)), total, budget...)
}

// pss is a process' proportional set size in bytes (proc(5), smaps_rollup); 0: it has ended.
func pss(b *testing.B, pid int) int64 {
	b.Helper()
	path := fmt.Sprintf("/proc/%d/smaps_rollup", pid)
	data, err := os.ReadFile(path)
	if err != nil {
		if _, there := os.Stat(fmt.Sprintf("/proc/%d/exe", pid)); there == nil {
			b.Fatal(err)
		}
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if kib, ok := strings.CutPrefix(line, "Pss:"); ok {
			n, err := strconv.ParseInt(strings.Fields(kib)[0], 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			return n << 10
		}
	}
	b.Fatalf("%s has no Pss", path)
	return 0
}

// gbctlVersion is how long a person waits for the shortest answer.
func gbctlVersion(b *testing.B, c *e2etest.Cluster) {
	b.Helper()
	c.Gbctl("version") // so that it is built
	var times []time.Duration
	for range versionRuns {
		start := time.Now()
		c.Gbctl("version")
		times = append(times, time.Since(start))
	}
	report(b, of(milliseconds, "gbctl version, whole process, median", quantile(times, 0.5), budgetVersion))
}

// patch is the time from asking for another argument of the API server until its static pod
// is on disk, as the node's own files show it.
func patch(b *testing.B, c *e2etest.Cluster) {
	b.Helper()
	machine, err := client.Dial(c.Access(), c.Nodes[0].Address.String())
	if err != nil {
		b.Fatal(err)
	}
	defer machine.Close()
	got, err := client.Unary(b.Context(), machine.Config.Get, &garboardv1.GetConfigRequest{})
	if err != nil {
		b.Fatal(err)
	}
	before := got.GetDocument()
	pod := fmt.Sprintf("/proc/%d/root/etc/kubernetes/manifests/garboard-kube-apiserver.yaml", c.NodeInit(c.Node(), "--mode=container"))
	var times []time.Duration
	for i := range patchRuns {
		mark := "bench=" + strconv.Itoa(100+i) // of a module that isn't there: nothing changes but the text
		document := bytes.Replace(before, []byte("\n  apiServer:\n"), []byte("\n  apiServer:\n    extraArgs: {vmodule: "+mark+"}\n"), 1)
		start := time.Now()
		if _, err := machine.Config.Apply(b.Context(), connect.NewRequest(&garboardv1.ApplyConfigRequest{Document: document, Mode: garboardv1.ApplyMode_APPLY_MODE_IMMEDIATE})); err != nil {
			b.Fatal(err)
		}
		for text := ""; !strings.Contains(text, mark); {
			data, err := os.ReadFile(pod)
			if text = string(data); time.Since(start) > patchLimit {
				b.Fatalf("the changed static pod isn't on disk: %v\n%s", err, text)
			}
		}
		times = append(times, time.Since(start))
	}
	report(b, of(milliseconds, "configuration patch → static pod on disk, median", quantile(times, 0.5), budgetPatch))
}
