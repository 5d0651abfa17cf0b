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
)

// condition is something that can be the matter with a node.
type condition struct {
	id       string
	severity garboardv1.Finding_Severity
	// follows are the conditions that explain this one where they hold, the
	// likeliest root first. They are before this one in the table.
	follows []string
	// causes know better than its texts, where what failed has published a reason.
	causes []cause
	holds  func(*snapshot) []finding
}

// text is what a person reads of a condition: what is seen of it, for the catalogue, and why and what next, also for
// findings that know no better.
type text struct{ Sees, Why, Next string }

//go:embed texts.yaml
var textFile []byte

// texts are those of all conditions, by ID. A test reads them all.
var texts = sync.OnceValue(func() (all map[string]text) {
	_ = yaml.Unmarshal(textFile, &all)
	return all
})

// cause is the texts for some reasons.
type cause struct {
	codes     []reason.Code
	why, next string // "": the condition's
}

// finding is that a condition holds.
type finding struct {
	what      string
	code      reason.Code // as published; "": none
	why, next string      // "": the cause's, or the condition's
	evidence  []string
	since     time.Time
	// passing: it is younger than what it normally takes.
	passing  bool
	severity garboardv1.Finding_Severity // 0: the condition's

	of      *condition
	cause   *condition // what it follows from; nil: nothing that holds
	ordinal int        // of the condition in the table
}

// conditions are all of them, causes before consequences.
var conditions = slices.Concat(machineConditions, problemConditions, networkConditions, clockConditions, serviceConditions, etcdConditions, kubeletConditions,
	controlPlaneConditions, sharedConditions, endpointConditions, nodeConditions, configurationConditions, operationConditions)

// evaluate evaluates every condition, and puts causes before their consequences.
func evaluate(s *snapshot) []*garboardv1.Finding {
	var found []*finding
	held := map[string]*condition{}
	for i := range conditions {
		c := &conditions[i]
		for _, f := range c.ask(s) {
			f.of, f.ordinal = c, i
			for _, cause := range c.causes {
				if slices.Contains(cause.codes, f.code) {
					f.why, f.next = cmp.Or(f.why, cause.why), cmp.Or(f.next, cause.next)
				}
			}
			f.severity = cmp.Or(f.severity, c.severity)
			if f.passing {
				f.severity = info
			}
			found = append(found, &f)
			held[c.id] = c
		}
	}
	fold(found, held)
	slices.SortStableFunc(found, func(a, b *finding) int {
		return cmp.Or(-cmp.Compare(a.severity, b.severity), cmp.Compare(a.ordinal, b.ordinal))
	})
	out := make([]*garboardv1.Finding, 0, len(found))
	for _, f := range found {
		out = append(out, f.message())
	}
	return out
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
		for _, id := range f.of.follows {
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
	own := texts()[f.of.id]
	m := &garboardv1.Finding{
		Severity: f.severity, Id: f.of.id, What: fit(f.what), Why: fit(cmp.Or(f.why, own.Why)), Next: fit(cmp.Or(f.next, own.Next)), Evidence: bounded(f.evidence),
	}
	if f.cause != nil {
		m.Why = strings.TrimSpace(fmt.Sprintf("Follows from %s. %s", f.cause.id, fit(f.why)))
		m.Next = fmt.Sprintf("Solve %s: this is its consequence.", f.cause.id)
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
