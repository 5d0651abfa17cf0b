package doctor

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/network"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

func TestLastError(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct{ part, flag string }{
		"etcd-unknown-flag.log":      {"flag provided but not defined", "no-such-flag"},
		"kubelet-unknown-flag.log":   {"unknown flag: --nope", "nope"},
		"kubelet-bad-value.log":      {"invalid argument", "max-pods"},
		"apiserver-unknown-flag.log": {"unknown flag: --nope", "nope"},
	} {
		data, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		words := lastError(strings.Split(string(data), "\n"))
		if !strings.Contains(words, want.part) || wrongFlag(words) != want.flag {
			t.Errorf("%s: %q, which blames %q", name, words, wrongFlag(words))
		}
	}
	if got := lastError([]string{"one", "two", ""}); got != "two" {
		t.Errorf("of nothing telling: %q", got)
	}
	if got := lastError(nil); got != "" {
		t.Errorf("of nothing: %q", got)
	}
}

func TestBlame(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		words           string
		extra           config.Args
		explainArgument string
	}{
		{"unknown flag: --nope", config.Args{"nope": {"1"}}, `args has nope: "1"`},
		{"unknown flag: --node-ip", config.Args{"v": {"4"}}, "image doesn't know the argument node-ip"},
		{"unrecognized feature gate: X; set feature gates from flags", config.Args{"feature-gates": {"X=true"}}, "has feature-gates"},
		{`open /etc/audit/none.yaml: no such file`, config.Args{"audit-policy-file": {"/etc/audit/none.yaml"}}, "has audit-policy-file"},
		{"it was false of v1 to say so", config.Args{"v": {"1"}, "anonymous-auth": {"false"}}, ""},
		{"the server is overloaded", config.Args{"over": {"1"}}, ""},
		{"connection refused", nil, ""},
	} {
		why, _, ok := explainArgument(c.words, "args", "image", c.extra)
		if ok != (c.explainArgument != "") || !strings.Contains(why, c.explainArgument) {
			t.Errorf("%q: %v %q", c.words, ok, why)
		}
	}
}

func nothing(string, int) []string { return nil }

// A condition with a defect is told as that, and the others all the same: it is PID 1
// that looks.
func TestDefect(t *testing.T) {
	t.Parallel()
	c := condition{ID: "x", severity: failure, holds: func(s *snapshot) []finding { panic("oh") }}
	if found := c.ask(nil); len(found) != 1 || !strings.Contains(found[0].evidence[0], "oh") {
		t.Errorf("found %v", found)
	}
	n := start(t, config.Worker, func(n *node, _ map[string]*dag.Service) { n.full = func(string) (space, bool) { panic("oh") } })
	n.finds("look-unanswered", warning, "free space", "panic: oh")
}

// A name with several addresses of which one is dead still serves.
func TestEndpointPartlyAnswering(t *testing.T) {
	t.Parallel()
	a, b := netip.MustParseAddr("10.5.0.2"), netip.MustParseAddr("10.5.0.3")
	s := &snapshot{sinceBoot: time.Hour, now: time.Now(), tail: nothing, endpoint: &endpoint{url: "https://k", addresses: []netip.Addr{a, b}, answers: []answer{
		{from: "https://k at 10.5.0.2", code: http.StatusOK, body: "ok"}, {from: "https://k at 10.5.0.3", err: errors.New("connection refused")},
	}}}
	found := evaluate(s)
	if len(found) != 1 || found[0].Id != "endpoint-not-answering" || found[0].Severity != warning || !strings.Contains(found[0].What, "1 of the 2 addresses") {
		t.Errorf("found:\n%s", showAll(found))
	}
	s.endpoint.answers[1] = s.endpoint.answers[0]
	if found := evaluate(s); len(found) > 0 {
		t.Errorf("found:\n%s", showAll(found))
	}
}

// What services, containers and servers say is anything at all.
func FuzzEvaluate(f *testing.F) {
	f.Add(`{"msg":"recovered/added member from store","local-member-id":"6","recovered-remote-peer-id":"6","recovered-remote-peer-urls":["http://127.0.0.9:33380"]}`,
		podList(staticPod(apiServer, crashed), staticPod(scheduler, unpulled)), "[-]etcd failed")
	f.Add(``, `{"items":[{"status":{"conditions":[{"type":"Ready","status":"False"}]}}]}`, "ok")
	f.Add(`{"msg":"Error syncing pod, skipping","pod":{"name":"kube-apiserver"},"err":"ErrImagePull"}`, `{"items":[null,1,{"status":1},{"metadata":[]}]}`, "")
	f.Fuzz(func(t *testing.T, log, objects, body string) {
		lines := strings.Split(log, "\n")
		var list kubeclient.Object
		_ = json.Unmarshal([]byte(objects), &list) // what isn't JSON is no answer
		items := list.Items()
		var first kubeclient.Object
		if len(items) > 0 {
			first = items[0]
		}
		c := &config.Config{}
		c.Machine.Type = config.Init
		c.Machine.Kubelet.ExtraArgs = config.Args{"[": {"("}, "feature-gates": {body}}
		address := network.NodeAddress{Primary: netip.MustParseAddr("10.5.0.2")}
		failed := func(id string) service {
			e := dag.Event{Service: id, State: dag.Failed, Message: log}
			return service{Status: dag.Status{ID: id, State: dag.Failed, Message: log}, events: []dag.Event{e}}
		}
		s := &snapshot{
			now: time.Now(), sinceBoot: time.Hour, hostname: "n1", config: c, address: &address, tail: func(string, int) []string { return lines },
			services: map[string]service{"etcd": failed("etcd"), "kubelet": failed("kubelet"), "containerd": failed("containerd")},
			pods:     map[string]kubeclient.Object{apiServer: first},
			files:    files{seen: true, etcdSeen: true, pods: map[string][]string{apiServer: lines, scheduler: lines}},
			local:    &answer{code: http.StatusInternalServerError, body: body}, programs: map[string]answer{scheduler: {code: 500, body: body}},
			endpoint: &endpoint{url: "https://k", addresses: []netip.Addr{address.Primary}, answers: []answer{{code: 500, body: body}}},
			etcd:     &member{ready: answer{code: 503, body: body}, members: []*pb.Member{{Name: body}}, alarms: []string{body}},
			cluster:  &cluster{node: first, csrs: items, pods: items, nodeErr: &kubeclient.StatusError{Code: http.StatusNotFound, Message: body}},
		}
		for _, found := range evaluate(s) {
			if found.What == "" || found.Why == "" || found.Next == "" || found.Severity == 0 || len(found.Evidence) > maxEvidence {
				t.Errorf("it lacks something:\n%s", show(found))
			}
			if strings.HasPrefix(strings.Join(found.Evidence, ""), "panic") {
				t.Error(show(found))
			}
			if slices.ContainsFunc(found.Evidence, func(e string) bool { return !utf8.ValidString(e) || len(e) > maxLine+4 }) || !utf8.ValidString(found.What+found.Why+found.Next) {
				t.Errorf("not fit to be shown:\n%s", show(found))
			}
		}
	})
}
