package doctor

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
)

var etcdConditions = checks{
	"etcd-waits-for-bootstrap": etcdWaits,
	"etcd-foreign-data":        func(s *snapshot) []finding { return append(etcdForeign(s), foreignSecrets(s)...) },
	"etcd-no-space": func(s *snapshot) []finding {
		if s.etcd == nil || len(s.etcd.alarms) == 0 {
			return nil
		}
		f := finding{what: "etcd has an alarm: " + strings.Join(s.etcd.alarms, ", ") + ".", evidence: []string{"etcd alarms: " + strings.Join(s.etcd.alarms, ", ")}}
		if strings.Join(s.etcd.alarms, "") != "NOSPACE" {
			f.why, f.next = "A member's data differs from that of the others.", "Replace the member whose data is corrupt: gbctl -n ADDRESS reset --system-labels-to-wipe EPHEMERAL --reboot on its node, which then joins again."
		}
		return one(f)
	},
	"etcd-not-running": etcdDown,
	"etcd-even-members": func(s *snapshot) []finding {
		if s.etcd == nil {
			return nil
		}
		voters := s.etcd.voters()
		return when(voters > 0 && voters%2 == 0, finding{what: fmt.Sprintf("etcd has %d members.", voters), evidence: lists.Of(s.etcd.members, describeMember)})
	},
}

func etcdWaits(s *snapshot) []finding {
	svc, ok := s.services[etcd.ID]
	waits := svc.State == dag.Preparing && svc.Reason != "" && svc.Reason != containerd.Pulling
	if !ok || svc.Up || !s.controlPlane() || s.config.Machine.Type == config.Init && !waits || !s.files.etcdSeen || s.files.etcdData || stopped(svc) {
		return nil
	}
	f := finding{what: "etcd has no data on this node and waits for a cluster to join.", code: svc.Reason, since: s.at(svc.Since), until: s.at(bootstrapTime),
		evidence: []string{svc.asStatus(), boot.EtcdDataDir + " is empty; machine.type is " + string(s.config.Machine.Type)}}
	if e := s.endpoint; e != nil {
		for _, a := range e.answers {
			f.evidence = append(f.evidence, a.text())
			if a.ok() {
				f.why = "Kubernetes serves at " + e.url + ", and this node hasn't joined its etcd yet."
				f.next = "It should join within a minute; gbctl logs etcd shows why not."
			}
		}
	}
	return one(f)
}

// recovered is what etcd says of each member that it finds in its data, and of
// itself.
type recovered struct {
	Local string   `json:"local-member-id"`
	ID    string   `json:"recovered-remote-peer-id"`
	URLs  []string `json:"recovered-remote-peer-urls"`
}

// etcdForeign holds where the data knows this member by an address that the node
// doesn't have.
func etcdForeign(s *snapshot) []finding {
	svc, ok := s.services[etcd.ID]
	if !ok || svc.Up || s.address == nil {
		return nil
	}
	var f finding
	if svc.Reason == etcd.ForeignData {
		f.what = "etcd has data of another cluster, and doesn't start with it."
	}
	for _, line := range s.tail(etcd.ID, 0) {
		switch {
		case strings.Contains(line, `"msg":"server has already been initialized"`):
			f = finding{} // a new run
		case strings.Contains(line, "recovered/added member from store"):
			var r recovered
			if json.Unmarshal([]byte(line), &r) != nil || r.ID != r.Local || s.has(r.URLs) {
				continue
			}
			f.what = fmt.Sprintf("etcd's data is of a member at %s, and this node is at %s.", strings.Join(r.URLs, ", "), s.address.Primary)
			f.evidence = append(f.evidence, asLog(etcd.ID, line))
		case strings.Contains(line, "cluster ID mismatch"):
			f.what = "etcd's data is of another cluster than that of its peers."
			f.evidence = append(f.evidence, asLog(etcd.ID, line))
		case strings.Contains(line, "the member has been permanently removed from the cluster"):
			f.what = "This member was removed from its cluster."
			f.why = "Its data is of a member that the cluster no longer has."
			f.next = "Reset the node; it joins again as another member."
			f.evidence = append(f.evidence, asLog(etcd.ID, line))
		}
	}
	if f.what == "" {
		return nil
	}
	f.since = s.at(svc.Since)
	f.evidence = append(f.evidence, svc.asStatus())
	if s.etcd != nil && !s.etcd.ready.ok() {
		f.evidence = append(f.evidence, s.etcd.ready.text())
	}
	return one(f)
}

// foreignSecrets holds where etcd does well with the data of another cluster, and the
// API server can't read the Secrets in it: they are encrypted with that cluster's key.
// Without them it never becomes ready.
func foreignSecrets(s *snapshot) []finding {
	if s.local == nil || s.local.ok() {
		return nil
	}
	// "unable to transform key KEY", since Kubernetes 1.37 "Key: KEY, …: data from the storage is not transformable".
	for _, line := range slices.Backward(s.files.pods[apiServer]) {
		if strings.Contains(line, "/registry/secrets/") && strings.Contains(line, "transform") {
			return one(finding{
				what:     "etcd's data holds Secrets of another cluster.",
				why:      "They are encrypted with another key than that from cluster.secret: " + boot.EtcdDataDir + " is of an older installation, or the configuration has new secrets.",
				next:     "If the data is of an older installation, remove it: gbctl -n ADDRESS reset --graceful=false --system-labels-to-wipe EPHEMERAL --reboot. To keep it, apply the configuration with the cluster's own secrets.",
				evidence: []string{asLog(apiServer, line), s.local.text()},
			})
		}
	}
	return nil
}

// has says whether one of the URLs is at an address of the node.
func (s *snapshot) has(urls []string) bool {
	for _, text := range urls {
		u, err := url.Parse(text)
		if err != nil {
			continue
		}
		if a, err := netip.ParseAddr(u.Hostname()); err == nil && s.isMine(a) {
			return true
		}
	}
	return false
}

func (s *snapshot) isMine(a netip.Addr) bool {
	if s.address == nil {
		return false
	}
	if a == s.address.Primary || a == netip.IPv6Loopback() || a == netip.AddrFrom4([4]byte{127, 0, 0, 1}) {
		return true
	}
	return slices.ContainsFunc(s.address.All, func(p netip.Prefix) bool { return p.Addr() == a }) ||
		slices.ContainsFunc(s.shared, func(v vip.Status) bool { return v.Holder && v.Address == a })
}

func etcdDown(s *snapshot) []finding {
	if !s.controlPlane() {
		return nil
	}
	found := s.down(etcd.ID, "etcd is not running.")
	for i := range found {
		f := &found[i]
		words := strings.Join(f.evidence, "\n")
		if why, next, ok := explainArgument(words, "cluster.etcd.extraArgs", s.config.Cluster.Etcd.Image, s.config.Cluster.Etcd.ExtraArgs); ok {
			f.why, f.next = why, next
		}
		if svc := s.services[etcd.ID]; svc.State == dag.Running {
			if svc.Reason == etcd.Learner {
				f.what = "etcd joins the cluster, and doesn't vote yet."
			} else {
				f.what = "etcd runs and is not healthy."
				f.why = "It has no leader: too few of the members that it knows answer, or it is still starting."
				f.next = "Start the other members again; a majority is needed. If they are lost for good, recover the cluster from a snapshot: wipe this node (gbctl -n ADDRESS reset --graceful=false --system-labels-to-wipe EPHEMERAL --reboot), then run gbctl -n ADDRESS bootstrap --recover-from SNAPSHOT."
			}
			if s.etcd != nil {
				f.evidence = append(f.evidence, s.etcd.ready.text())
				f.evidence = append(f.evidence, lists.Of(s.etcd.members, describeMember)...)
			}
		}
	}
	return found
}
