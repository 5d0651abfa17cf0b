package doctor

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/kubernetes/vip"
)

// moveTime is longer than the shared address needs to go from one node to another,
// also when etcd has to elect a leader first.
const moveTime = 30 * time.Second

var sharedConditions = checks{
	"shared-address-taken": func(s *snapshot) []finding {
		return s.eachShared(func(a vip.Status) (string, bool) {
			return fmt.Sprintf("The machine %s on %s has the shared address %s.", a.Conflict, a.Link, a.Address), a.Conflict != ""
		})
	},
	"shared-address-not-held": func(s *snapshot) []finding {
		found := s.eachShared(func(a vip.Status) (string, bool) {
			return fmt.Sprintf("No node holds the shared address %s.", a.Address), a.Known && a.HeldBy == "" && !a.Holder && s.now.Sub(a.Since) > moveTime
		})
		for i := range found {
			found[i].until = s.at(bootstrapTime)
		}
		return found
	},
	"shared-address-not-served": func(s *snapshot) []finding {
		if s.local == nil || s.local.okButForEtcd() {
			return nil
		}
		found := s.eachShared(func(a vip.Status) (string, bool) {
			return fmt.Sprintf("No API server serves at the shared address %s: this node has it.", a.Address), a.Holder
		})
		for i := range found {
			found[i].evidence = append(found[i].evidence, s.local.text())
		}
		return found
	},
	"shared-address-two-members": func(s *snapshot) []finding {
		return s.eachShared(func(a vip.Status) (string, bool) {
			return fmt.Sprintf("The shared address %s can't move: etcd has 2 members.", a.Address), s.etcd != nil && s.etcd.voters() == 2
		})
	},
}

// eachShared is a finding for each shared address of which about has something to
// say.
func (s *snapshot) eachShared(about func(vip.Status) (what string, holds bool)) []finding {
	return lists.Some(s.shared, func(a vip.Status) (finding, bool) {
		what, holds := about(a)
		holder := cmp.Or(a.HeldBy, map[bool]string{true: "no node", false: "unknown"}[a.Known])
		if a.Holder {
			holder = "this node"
		}
		f := finding{what: what, since: a.Since, evidence: []string{
			fmt.Sprintf("VIPStatus network/%s on %s: holder %s, %d candidates: %s", a.Address, a.Link, holder, a.Candidates, a.Why),
		}}
		if a.Etcd != "" {
			f.evidence = append(f.evidence, "etcd: "+a.Etcd)
		}
		return f, holds
	})
}

// okButForEtcd is true of an API server that lacks nothing but etcd's quorum.
func (a answer) okButForEtcd() bool {
	if a.err != nil || a.code == http.StatusOK {
		return a.err == nil
	}
	bad := failedChecks(a.body)
	return len(bad) > 0 && !slices.ContainsFunc(bad, func(line string) bool { return !strings.HasPrefix(line, "[-]etcd") })
}
