package doctor

import (
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	laid "github.com/garboard-os/garboard/services/system/files"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/sysctl"
	"github.com/garboard-os/garboard/services/system/udev"
)

// A problem of any object is told of; when it stays, it is a warning. One that ends is not.
func TestProblems(t *testing.T) {
	t.Parallel()
	n := start(t, config.Worker)
	w := n.store.As("test")
	n.must(sysctl.Statuses.Put(w, "net.ipv4.ip_forward", sysctl.Status{Value: "1"}))
	n.healthy()
	n.must(sysctl.Statuses.Put(w, "net.ipv4.ipforward", sysctl.Status{Problem: "there is no such parameter"}))
	n.finds("problem-stays", info, "SysctlStatuses net.ipv4.ipforward has a problem: there is no such parameter")
	n.now = func() time.Time { return time.Now().Add(problemTime) }
	n.must(sysctl.SysfsStatuses.Put(w, "block.sda.queue", sysctl.Status{Problem: "read-only file system"}))
	n.must(laid.Statuses.Put(w, "/var/etc/a", laid.Status{Problem: "no space left on device"}))
	n.must(udev.ModuleStatuses.Put(w, "drbd", udev.ModuleStatus{Problem: "no such module"}))
	n.must(network.Statuses.Put(n.store.As(network.ID), network.ID, network.Status{Problems: []string{"route 192.0.2.0/24: network is unreachable", "link eth9: missing"}}))
	for _, words := range []string{"net.ipv4.ipforward", "block.sda.queue", "/var/etc/a", "drbd", "link eth9: missing"} {
		n.finds("problem-stays", warning, words)
	}
	n.must(sysctl.Statuses.Delete(w, "net.ipv4.ipforward"))
	n.must(sysctl.SysfsStatuses.Put(w, "block.sda.queue", sysctl.Status{Value: "none"}))
	n.must(laid.Statuses.Put(w, "/var/etc/a", laid.Status{Size: 1}))
	n.must(udev.ModuleStatuses.Put(w, "drbd", udev.ModuleStatus{Loaded: true}))
	n.must(network.Statuses.Put(n.store.As(network.ID), network.ID, network.Status{}))
	n.lacks("problem-stays")
}

// networkd tells a problem with the object that has it, and again in its status: it is found once, and what only the
// status has, too. Objects of one type may have the same problem, and so may those of another owner.
func TestProblemIsFoundOnce(t *testing.T) {
	t.Parallel()
	const taken, mask, missing = "another host of the network has this address", "the mask 0.0.0.0 can't be used, and is left out", `waiting for interface "eth9" to appear`
	n := start(t, config.Worker)
	w := n.store.As(network.ID)
	for _, a := range []string{"192.0.2.1/24", "192.0.2.2/24"} {
		n.must(network.OnLinks.Put(w, "eth0-"+a, network.Object{Link: "eth0", What: a, Problem: taken}))
	}
	n.must(network.LeaseList.Put(w, "eth0-DHCP", network.LeaseStatus{Link: "eth0", Problems: []string{mask}}))
	n.must(network.Links.Put(w, "eth9", network.LinkStatus{Problem: missing}))
	n.must(sysctl.Statuses.Put(n.store.As("test"), "net.ipv4.ipforward", sysctl.Status{Problem: taken}))
	told := []string{"address 192.0.2.1/24 of eth0: " + taken, "address 192.0.2.2/24 of eth0: " + taken, missing, "DHCP lease on eth0: " + mask}
	n.must(network.Statuses.Put(w, network.ID, network.Status{Problems: told}))
	for words, times := range map[string]int{taken: 3, mask: 1, missing: 1, "NetworkStatuses": 0} {
		found := 0
		for _, f := range n.diagnose() {
			if f.Id == "problem-stays" && strings.Contains(f.What, words) {
				found++
			}
		}
		if found != times {
			t.Errorf("%q is found %d times, want %d", words, found, times)
		}
	}
	n.must(network.Statuses.Put(w, network.ID, network.Status{Problems: append(told, "choose the card of the entry \"lan\"")}))
	n.finds("problem-stays", info, `NetworkStatuses networkd has a problem: choose the card`)
}
