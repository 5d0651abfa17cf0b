package doctor

import (
	"fmt"
	"strings"
	"time"
)

// maxSkew: leases of Kubernetes are over after 15 s; an HTTP date counts seconds.
const maxSkew = 15 * time.Second

var clockConditions = checks{
	"clock-not-synced": func(s *snapshot) []finding {
		if s.clock == nil || s.clock.Synced || s.config != nil && s.config.Machine.Time.Disabled {
			return nil
		}
		return one(finding{what: "The clock isn't synchronised.", code: s.clock.Reason, since: s.clock.LastSync,
			until: s.at(startTime), evidence: []string{"time status: " + s.clock.Message}})
	},
	"time-server-unusable": func(s *snapshot) []finding {
		if s.clock == nil || !s.clock.Synced || len(s.clock.Unusable) == 0 { // clock-not-synced says why
			return nil
		}
		return one(finding{what: fmt.Sprintf("The clock is synchronised, and these time servers are of no use: %s.", strings.Join(s.clock.Unusable, "; ")), since: s.clock.LastSync, evidence: s.clock.Unusable})
	},
	"clock-wrong": clockWrong,
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
	return one(f)
}
