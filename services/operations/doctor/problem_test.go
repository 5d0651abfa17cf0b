package doctor

import (
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
