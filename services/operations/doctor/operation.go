package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/slots"
)

// failedTime is how long an operation or a system that has failed is told of: whoever didn't see
// it within a day has given it up.
const failedTime = 24 * time.Hour

var operationConditions = checks{
	"operation-asks": func(s *snapshot) []finding {
		return lists.Some(s.operations, func(o resource.Object[operation.Spec]) (finding, bool) {
			return finding{
				what: fmt.Sprintf("Operation %s waits for an answer: %s", o.ID, o.Spec.Question), since: o.Spec.Began,
				next:     fmt.Sprintf("Answer it: gbctl -n ADDRESS operation answer %s ANSWER. gbctl -n ADDRESS operation attach %s shows the events before it.", o.ID, o.ID),
				evidence: []string{asOperation(o)},
			}, o.Spec.Question != ""
		})
	},
	"operation-failed": func(s *snapshot) []finding {
		last := map[string]resource.Object[operation.Spec]{} // of each name
		for _, o := range s.operations {
			if before, ok := last[o.Spec.Name]; !ok || o.Spec.Began.After(before.Spec.Began) {
				last[o.Spec.Name] = o
			}
		}
		return lists.Some(s.operations, func(o resource.Object[operation.Spec]) (finding, bool) {
			return finding{
				what: fmt.Sprintf("Operation %s has failed: %s", o.ID, o.Spec.Error), since: o.Spec.Ended,
				next:     fmt.Sprintf("Look at its events (gbctl -n ADDRESS operation attach %s), remove the cause, and start it again.", o.ID),
				evidence: []string{asOperation(o)},
			}, o.Spec.State == operation.Failed && last[o.Spec.Name].ID == o.ID && s.now.Sub(o.Spec.Ended) <= failedTime
		})
	},
	"system-failed": func(s *snapshot) []finding {
		return lists.Some(s.slots, func(slot resource.Object[slots.Status]) (finding, bool) {
			// Who asked for its end, or waited for it, knows it.
			told := slices.ContainsFunc(s.operations, func(o resource.Object[operation.Spec]) bool {
				return slices.Contains([]string{"install", "upgrade", "rollback"}, o.Spec.Name) && !o.Spec.Began.After(slot.Spec.Since) && !o.Spec.Ended.Before(slot.Spec.Since)
			})
			return finding{
				what: fmt.Sprintf("Garboard %s in slot %s has failed: %s", slot.Spec.Version, slot.ID, slot.Spec.Reason), since: slot.Spec.Since,
				evidence: []string{fmt.Sprintf("resource Slots %s: %s since %s", slot.ID, slot.Spec.State, stamp(slot.Spec.Since))},
			}, slot.Spec.State == boot.SlotBad && s.now.Sub(slot.Spec.Since) <= failedTime && !told
		})
	},
}

func asOperation(o resource.Object[operation.Spec]) string {
	return fmt.Sprintf("resource Operations %s: %s since %s, asked by %s", o.ID, o.Spec.State, stamp(o.Spec.Began), o.Spec.By)
}

// problemTime is how long a problem may last without being more than a delay: what couldn't be
// done is tried again within a minute.
const problemTime = 2 * time.Minute

var problemConditions = checks{
	"problem-stays": func(s *snapshot) (out []finding) {
		for _, o := range s.troubled {
			problems := slices.DeleteFunc(resource.Problems(o.Spec), func(p string) bool { return s.retells(o, p) })
			if len(problems) == 0 || ofManifest(o) { // said by other conditions
				continue
			}
			name, _, _ := strings.Cut(o.Type, ".")
			out = append(out, finding{what: fmt.Sprintf("%s %s has a problem: %s.", name, o.ID, problems[0]), since: o.Troubled, until: o.Troubled.Add(problemTime),
				evidence: append([]string{fmt.Sprintf("resource %s %s", name, o.ID)}, problems...)})
		}
		return out
	},
}

// retells reports whether an object only repeats the problem of another one: a status in which the same owner sums its
// objects up has the text of theirs at the end of its own.
func (s *snapshot) retells(o resource.Object[any], problem string) bool {
	return slices.ContainsFunc(s.troubled, func(other resource.Object[any]) bool {
		return other.Owner == o.Owner && other.Type != o.Type && slices.ContainsFunc(resource.Problems(other.Spec), func(p string) bool {
			return strings.HasSuffix(problem, p) && (problem != p || other.Type < o.Type)
		})
	})
}

var configurationConditions = checks{
	"configuration-tried": func(s *snapshot) []finding {
		t := s.situation.Try
		return when(!t.IsZero(), finding{what: fmt.Sprintf("A change of the configuration is being tried, and is undone in %s.", max(t.Sub(s.now), 0).Round(time.Second)),
			evidence: []string{fmt.Sprintf("configuration version %d: tried until %s", s.situation.Version, stamp(t))}})
	},
	"configuration-staged": func(s *snapshot) []finding {
		return when(s.situation.Staged, finding{what: "A configuration waits for the next boot.", evidence: []string{fmt.Sprintf("configuration version %d: staged", s.situation.Version)}})
	},
	"configuration-warnings": func(s *snapshot) []finding {
		return one(finding{what: fmt.Sprintf("The configuration has %d warnings.", len(s.warnings)), evidence: lists.Of(s.warnings, config.Warning.String)})
	},
}
