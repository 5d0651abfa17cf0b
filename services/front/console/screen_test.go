package console

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

func problems(all ...string) (found []*garboardv1.Finding) {
	for _, what := range all {
		found = append(found, &garboardv1.Finding{Severity: garboardv1.Finding_SEVERITY_ERROR, What: what})
	}
	return found
}

func (r *rig) named(t *testing.T, name string, addresses ...string) {
	t.Helper()
	a := network.NodeAddress{}
	for _, text := range addresses {
		a.All = append(a.All, netip.MustParsePrefix(text))
	}
	put(t, network.Hostnames.Put(r.o.Store.As(network.ID), network.HostnameID, name))
	if len(a.All) > 0 {
		a.Primary = a.All[0].Addr()
		put(t, network.Addresses.Put(r.o.Store.As(network.ID), network.AddressID, a))
	}
}

func (r *rig) runs(t *testing.T) {
	t.Helper()
	put(t, configuration.Stages.Put(r.o.Store.As(configuration.ID), configuration.StageID, configuration.Configured))
	put(t, configuration.Configs.Put(r.o.Store.As(configuration.ID), configuration.ConfigID, &config.Config{}))
}

func (r *rig) serves(t *testing.T) {
	t.Helper()
	r.runs(t)
	put(t, kubelet.NodeHealths.Put(r.o.Store.As("k8s.NodeHealthController"), kubelet.HealthID, kubelet.NodeHealth{Serves: "yes"}))
}

// screens are what a person sees of a node, by the name of a file in testdata.
var screens = map[string]func(t *testing.T, r *rig){
	"booting": func(t *testing.T, r *rig) {
		r.runs(t)
		r.named(t, "n1", "10.0.0.5/24")
		r.waits = []string{
			"containerd Starting for 3s: Waiting for its socket", "timed Running for 12s: no time server has answered: 198.51.100.1 (no answer), 198.51.100.2 (no answer), 198.51.100.3",
			"behind them: etcd, kubelet, vip",
		}
		r.wrong = []*garboardv1.Finding{{Severity: garboardv1.Finding_SEVERITY_INFO, What: "The kubelet isn't up yet."}}
	},
	"maintenance": func(t *testing.T, r *rig) {
		put(t, configuration.Stages.Put(r.o.Store.As(configuration.ID), configuration.StageID, configuration.Maintenance))
		r.named(t, "garboard-5254", "10.0.0.5/24", "2001:db8:1234:5678:9abc:def0:1234:5678/64")
		r.own = strings.Repeat("0123456789abcdef", 4)
	},
	"maintenance-without-address": func(t *testing.T, r *rig) {
		put(t, configuration.Stages.Put(r.o.Store.As(configuration.ID), configuration.StageID, configuration.Maintenance))
		put(t, network.Statuses.Put(r.o.Store.As(network.ID), network.ID, network.Status{Problems: []string{"link eth0: no cable"}}))
		r.waits = []string{"networkd Running for 20s: no DHCP answer on eth0, asking again"}
	},
	"bootstrap": func(t *testing.T, r *rig) {
		r.runs(t)
		r.named(t, "n1", "10.0.0.5/24")
		r.waits = []string{"etcd Preparing for 1m0s: Waiting for bootstrap, or for a control plane to join at https://10.0.0.5:6443"}
		r.wrong = problems("etcd waits for its bootstrap.")
		r.wrong[0].Id = "etcd-waits-for-bootstrap"
	},
	"serving": func(t *testing.T, r *rig) {
		r.serves(t)
		r.named(t, "n1", "10.0.0.5/24")
	},
	"problems": func(t *testing.T, r *rig) {
		r.runs(t)
		r.named(t, "n1", "10.0.0.5/24")
		fault := kubelet.Fault{Object: kubelet.NodeObject, Text: "the Node n1 is NotReady"}
		put(t, kubelet.NodeHealths.Put(r.o.Store.As("k8s.NodeHealthController"), kubelet.HealthID, kubelet.NodeHealth{Serves: "no", Faults: kubelet.Faults{fault}}))
		r.wrong = problems("The name server 10.0.0.1 doesn't answer.")
	},
	"stopped": func(t *testing.T, r *rig) {
		r.serves(t)
		r.named(t, "n1", "10.0.0.5/24")
		r.wrong = problems("Service etcd was stopped.")
	},
	"much": func(t *testing.T, r *rig) {
		r.runs(t)
		r.named(t, strings.Repeat("very-long-name.", 16)+"example.org", "2001:db8:1234:5678:9abc:def0:1234:5678/64", "10.0.0.5/24", "10.0.0.6/24", "10.0.0.7/24", "10.0.0.8/24")
		r.own = strings.Repeat("0123456789abcdef", 4)
		for i := range 20 {
			r.waits = append(r.waits, fmt.Sprintf("service%d Failed for 1h0m0s: %s", i, strings.Repeat("it ended, and is tried again; ", 9)))
			r.wrong = append(r.wrong, problems(fmt.Sprintf("Problem %d\x1b[2J of \u2192 many: %s", i, strings.Repeat("a word ", 30)))...)
		}
	},
	"shutdown": func(t *testing.T, r *rig) {
		r.serves(t)
		r.named(t, "n1", "10.0.0.5/24")
		r.ending, r.waits, r.wrong = true, []string{"kubelet Failed for 1s: it ended"}, problems("The API server doesn't answer.")
		put(t, operation.Operations.Put(r.o.Store.As(operation.ID), "shutdown-1", operation.Spec{Name: "shutdown", Step: "end"}))
	},
	"killed": func(t *testing.T, r *rig) {
		r.serves(t)
		r.named(t, "n1")
		r.ending = true
	},
}

// A screen is never larger than 80 columns and 25 rows, and has characters that every terminal has.
func TestScreens(t *testing.T) {
	t.Parallel()
	for name, of := range screens {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			of(t, r)
			lines := r.o.lines(r.waits, r.wrong)
			got := strings.ReplaceAll(strings.Join(lines, "\n")+"\n", boot.Version, "VERSION")
			path := filepath.Join("testdata", name)
			if os.Getenv("UPDATE_SCREENS") != "" {
				put(t, os.WriteFile(path, []byte(got), 0o644))
			}
			want, err := os.ReadFile(path)
			put(t, err)
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Error(diff)
			}
			if len(lines) >= rows { // the last one has the keys
				t.Errorf("%d rows", len(lines))
			}
			for _, line := range lines {
				if len(line) > 80 || strings.IndexFunc(line, func(r rune) bool { return r < ' ' || r > '~' }) >= 0 {
					t.Errorf("%q", line)
				}
			}
		})
	}
}

// A screen is drawn in its place whenever it says something else, also about the time that passes. What is typed and
// answered stays for a while.
func TestScreenIsDrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var shown bytes.Buffer
		s := &terminal{w: &shown, screen: true}
		const clear = "\x1b[2J\x1b[25;1H"
		time.Sleep(readTime)
		for i, step := range []struct {
			line  string
			do    func()
			first string
		}{
			{"a", func() {}, clear + "\x1b7\x1b[Ha\x1b[K\r\n\x1b[K\r\n"},
			{"a", func() {}, ""},
			{"b", func() {}, "\x1b7\x1b[Hb\x1b[K\r\n\x1b[K\r\n"},
			{"c", func() { put(t, s.answer("no command\n")); shown.Reset() }, ""},
			{"b", func() { time.Sleep(readTime) }, clear},
		} {
			step.do()
			shown.Reset()
			put(t, s.draw([]string{step.line}))
			if got := shown.String(); !strings.HasPrefix(got, step.first) || (got == "") != (step.first == "") || got != "" && (strings.Count(got, "\r\n") != rows || !strings.HasSuffix(got, "\x1b8")) {
				t.Errorf("step %d: %q", i, got)
			}
		}
	})
}
