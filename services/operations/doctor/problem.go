package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
)

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
