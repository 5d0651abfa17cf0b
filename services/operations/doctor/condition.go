package doctor

import (
	"cmp"
	_ "embed"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/reason"
)

// Severities by their short names.
const (
	info    = garboardv1.Finding_SEVERITY_INFO
	warning = garboardv1.Finding_SEVERITY_WARNING
	failure = garboardv1.Finding_SEVERITY_ERROR
)

// Bounds of what a finding carries: it is read by a person.
const (
	maxEvidence = 8   // lines
	maxLine     = 600 // bytes
	maxFindings = 8   // of one condition: a node may have a hundred pods
)

// condition is something that can be the matter with a node.
type condition struct {
	ID       string
	Severity string // as users read it
	// What a person reads of it: what is seen of it, for the catalogue, and why and what next, also for findings that
	// know no better.
	Sees, Why, Next string
	// Follows are the conditions that explain this one where they hold, the
	// likeliest root first. They are before this one in the table.
	Follows []string
	// Needs are the services that must run for the condition not to hold: one that was stopped by hand is its cause.
	Needs []string
	// Causes know better than its texts, where what failed has published a reason.
	Causes []cause

	severity garboardv1.Finding_Severity
	holds    func(*snapshot) []finding
}

// cause is the texts for some reasons.
type cause struct {
	Codes     []reason.Code
	Why, Next string   // "": the condition's
	Follows   []string // besides the condition's, and before them
}

// checks find conditions, by their IDs.
type checks map[string]func(*snapshot) []finding

//go:embed conditions.yaml
var table []byte

// rooms are the checks of all parts of a node.
var rooms = []checks{
	machineConditions, problemConditions, networkConditions, clockConditions, serviceConditions, etcdConditions, kubeletConditions,
	controlPlaneConditions, sharedConditions, endpointConditions, nodeConditions, configurationConditions, operationConditions,
}

// severities are those of the table.
var severities = map[string]garboardv1.Finding_Severity{"info": info, "warning": warning, "error": failure}

// conditions are all of them, causes before consequences. A test reads the whole table.
var conditions = sync.OnceValue(func() (all []condition) {
	_ = yaml.Unmarshal(table, &all)
	for i := range all {
		c := &all[i]
		c.severity = severities[c.Severity]
		for _, room := range rooms {
			if holds := room[c.ID]; holds != nil {
				c.holds = holds
			}
		}
	}
	return all
})

// finding is that a condition holds.
type finding struct {
	what      string
	code      reason.Code // as published; "": none
	why, next string      // "": the cause's, or the condition's
	evidence  []string
	since     time.Time
	// until is when it should have passed by itself: it is info until then. Zero: it doesn't pass.
	until    time.Time
	needs    []string                    // services that it waits for
	severity garboardv1.Finding_Severity // 0: the condition's

	passing bool // until is in the future
	follows []string
	of      *condition
	cause   *condition // what it follows from; nil: nothing that holds
}

// evaluate evaluates every condition, and puts causes before their consequences.
func evaluate(s *snapshot) []*garboardv1.Finding {
	var found []*finding
	held := map[string]*condition{}
	all := conditions()
	for i := range all {
		c := &all[i]
		// A condition holds by evidence, never for want of it.
		asked := slices.DeleteFunc(c.ask(s), func(f finding) bool { return len(f.evidence) == 0 })
		for _, f := range asked[:min(len(asked), maxFindings)] {
			if left := len(asked) - maxFindings; left > 0 {
				f.evidence = append(f.evidence, fmt.Sprintf("%d more findings %s aren't shown", left, c.ID))
			}
			f.of, f.passing = c, f.until.After(s.now)
			if slices.ContainsFunc(slices.Concat(c.Needs, f.needs), func(id string) bool { return stopped(s.services[id]) }) {
				f.follows = []string{serviceStopped}
			}
			for _, cause := range c.Causes {
				if slices.Contains(cause.Codes, f.code) {
					f.why, f.next, f.follows = cmp.Or(f.why, cause.Why), cmp.Or(f.next, cause.Next), append(f.follows, cause.Follows...)
				}
			}
			f.severity = cmp.Or(f.severity, c.severity)
			if f.passing {
				f.severity = info
			}
			found = append(found, &f)
			held[c.ID] = c
		}
	}
	fold(found, held)
	// they are in the table's order
	slices.SortStableFunc(found, func(a, b *finding) int { return cmp.Compare(b.severity, a.severity) })
	return lists.Of(found, (*finding).message)
}

// ask survives a defect of the condition: it runs in PID 1, over what anybody says.
func (c *condition) ask(s *snapshot) (found []finding) {
	defer func() {
		if p := recover(); p != nil {
			found = one(finding{what: "This condition could not be checked.", why: "A defect of the doctor.", next: "Report it, with the evidence.",
				evidence: []string{fmt.Sprintf("panic: %v", p), string(debug.Stack())}, severity: warning})
		}
	}()
	return c.holds(s)
}

// fold makes consequences what they are: they pass when their cause does. A cause
// is as bad as what follows from it, unless it is known to pass by itself.
func fold(found []*finding, held map[string]*condition) {
	worst := map[*condition]garboardv1.Finding_Severity{}
	for _, f := range found {
		for _, id := range append(f.follows, f.of.Follows...) {
			if c := held[id]; c != nil {
				f.cause = c
				break
			}
		}
	}
	// Consequences of consequences come later in the table than those, so going
	// backwards carries their severity to the root.
	for _, f := range slices.Backward(found) {
		if !f.passing {
			f.severity = max(f.severity, worst[f.of])
		}
		if f.cause != nil {
			worst[f.cause] = max(worst[f.cause], f.severity)
			f.severity = info
		}
	}
}

func (f *finding) message() *garboardv1.Finding {
	m := &garboardv1.Finding{
		Severity: f.severity, Id: f.of.ID, What: fit(f.what), Why: fit(cmp.Or(f.why, f.of.Why)), Next: fit(cmp.Or(f.next, f.of.Next)), Evidence: bounded(f.evidence),
	}
	if f.cause != nil {
		m.Why = strings.TrimSpace(fmt.Sprintf("Follows from %s. %s", f.cause.ID, fit(f.why)))
		m.Next = fmt.Sprintf("Solve %s: this is its consequence.", f.cause.ID)
	} else if f.passing {
		m.Next = fit(fmt.Sprintf("It should pass by itself before %s. Then, or to look closer: %s", stamp(f.until), m.Next))
	}
	if !f.since.IsZero() {
		m.Since = timestamppb.New(f.since)
	}
	return m
}

// bounded keeps the evidence readable.
func bounded(lines []string) (out []string) {
	for _, line := range lines {
		line = fit(line)
		if line != "" && !slices.Contains(out, line) && len(out) < maxEvidence {
			out = append(out, line)
		}
	}
	return out
}

// fit makes a line fit to be sent and read: logs and servers say anything, and a
// message with a string that isn't UTF-8 can't be sent at all.
func fit(line string) string {
	return config.Shorten(strings.ToValidUTF8(strings.TrimSpace(line), "\uFFFD"), maxLine)
}

// one is the result of a condition that holds at most once.
func one(f finding) []finding { return []finding{f} }

// when is the result of a condition that holds or doesn't. What is found must be safe to say either way.
func when(holds bool, f finding) []finding {
	if !holds {
		return nil
	}
	return one(f)
}
