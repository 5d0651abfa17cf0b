package doctor

import (
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// shares is what the service says of its one address.
func (n *node) shares(change func(*vip.Status)) {
	n.t.Helper()
	s := vip.Status{
		Address: netip.MustParseAddr("10.5.0.254"), Link: "eth0", HeldBy: "n2", Known: true, Candidates: 3, Why: "n2 holds it",
		Since: time.Now().Add(-time.Hour),
	}
	change(&s)
	n.must(vip.Statuses.Put(n.store.As(vip.ID), s.Address.String(), s))
}

func TestSharedAddress(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.shares(func(*vip.Status) {})
	n.healthy()
	n.shares(func(s *vip.Status) { s.Holder, s.HeldBy = true, nodeName })
	n.healthy()
	n.shares(func(s *vip.Status) { s.Conflict = "02:00:00:00:00:09" })
	n.finds("shared-address-taken", failure, "02:00:00:00:00:09", "10.5.0.254", "vip.ip")

	n.shares(func(s *vip.Status) { s.HeldBy, s.Since = "", time.Now() })
	n.healthy() // it moves
	n.shares(func(s *vip.Status) { s.HeldBy, s.Candidates = "", 0 })
	n.finds("shared-address-not-held", failure, "10.5.0.254", "holder no node")
	// Without etcd the holder is unknown.
	n.shares(func(s *vip.Status) { s.HeldBy, s.Known, s.Etcd = "", false, "context deadline exceeded" })
	n.healthy()

	n.shares(func(*vip.Status) {})
	n.etcd.members = append(n.etcd.members, &pb.Member{Name: "n2", PeerURLs: []string{"https://10.5.0.3:2380"}})
	n.finds("shared-address-two-members", warning, "10.5.0.254", "3 candidates")
}

func TestNoServerAtTheSharedAddress(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.shares(func(s *vip.Status) { s.Holder, s.HeldBy = true, nodeName })
	n.api.fail("/readyz", func(w http.ResponseWriter) {
		w.WriteHeader(http.StatusInternalServerError)
		w.Write([]byte("[+]ping ok\n[-]etcd failed: reason withheld\n[-]etcd-readiness failed: reason withheld\nreadyz check failed\n"))
	})
	n.lacks("shared-address-not-served") // it lacks nothing but the quorum
	n.api.fail("/readyz", func(w http.ResponseWriter) {
		w.WriteHeader(http.StatusInternalServerError)
		w.Write([]byte("[+]ping ok\n[-]shutdown failed: reason withheld\nreadyz check failed\n"))
	})
	n.finds("shared-address-not-served", info, "Follows from apiserver-not-running", "10.5.0.254", "shutdown failed")
}
