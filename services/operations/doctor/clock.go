package doctor

import (
	"fmt"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/system/clock"
)

// maxSkew: leases of Kubernetes are over after 15 s; an HTTP date counts seconds.
const maxSkew = 15 * time.Second

var clockConditions = []condition{
	{
		id: "clock-not-synced", severity: warning,
		follows: []string{"network-no-address", "network-no-route", "no-nameserver"},
		causes: []cause{
			{[]reason.Code{clock.ServersDisagree}, "The time servers don't agree on the time, and there is no majority.",
				"Remove the wrong ones from machine.time.servers. With four servers, one may be wrong."},
			{[]reason.Code{clock.Unconfirmed}, "One time server says that the clock is wrong by more than a day. Others must confirm that: servers that DHCP offers count as one, as do all addresses of one name.",
				"Name at least two servers in machine.time.servers, or set the clock: gbctl time set."},
			{[]reason.Code{clock.Impossible}, "Time servers say a time that can't be: the node has had it already, its system was built later, or the cluster's authorities have ended by then.",
				"Check the time servers. If they are right, and it is the clock that was wrong, set it: gbctl time set."},
		},
		holds: func(s *snapshot) []finding {
			if s.clock == nil || s.clock.Synced || s.config != nil && s.config.Machine.Time.Disabled {
				return nil
			}
			f := finding{what: "The clock isn't synchronised.", code: s.clock.Reason, passing: s.sinceBoot < startTime, evidence: []string{"time status: " + s.clock.Message}}
			if !s.clock.LastSync.IsZero() {
				f.since = s.clock.LastSync
			}
			return one(f)
		},
	},
	{
		id: "clock-wrong", severity: failure,
		follows: []string{"clock-not-synced"},
		holds:   clockWrong,
	},
}

// clockWrong compares the clock with those of others, as their answers say them,
// and with the certificates that the node can't have made in the future.
func clockWrong(s *snapshot) []finding {
	var f finding
	if s.endpoint != nil {
		for _, a := range s.endpoint.answers {
			if a.date.IsZero() {
				continue
			}
			// Any time within the request is right.
			skew := s.now.Add(a.took).Sub(a.date)
			if skew < -maxSkew || skew > maxSkew+collectBudget {
				f.what = fmt.Sprintf("The clock is off by %s from that of the cluster's endpoint.", skew.Round(time.Second))
				f.evidence = append(f.evidence, fmt.Sprintf("here it is %s; by %s it is %s", stamp(s.now), a.from, stamp(a.date)))
			}
		}
	}
	for _, c := range s.certificates {
		if s.now.Before(c.cert.NotBefore) {
			f.what = "The clock is before the time at which certificates were made."
			f.evidence = append(f.evidence, fmt.Sprintf("here it is %s; the certificate of %s is valid from %s", stamp(s.now), c.of, stamp(c.cert.NotBefore)))
		}
	}
	if f.what == "" {
		return nil
	}
	return one(f)
}
