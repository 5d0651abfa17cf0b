package doctor

import (
	"fmt"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
)

// problemTime is how long a problem may last without being more than a delay: what couldn't be
// done is tried again within a minute.
const problemTime = 2 * time.Minute

var problemConditions = []condition{
	{
		id: "problem-stays", severity: warning,
		sees: "A setting has no effect: gbctl get sysctls, sysfs, modules, files, volumes, or another type, shows a problem.",
		why:  "The node can't do what its configuration asks for, or what belongs to it is in disorder. The problem of the resource tells the reason.",
		next: "Remove the cause that the problem names; mostly it is a field of the machine configuration. The node tries again by itself: gbctl get, with the type of the resource, shows whether the problem has ended.",
		holds: func(s *snapshot) (out []finding) {
			for _, o := range s.troubled {
				age, problems := s.now.Sub(o.Troubled), resource.Problems(o.Spec)
				name, _, _ := strings.Cut(o.Type, ".")
				out = append(out, finding{what: fmt.Sprintf("%s %s has a problem: %s.", name, o.ID, problems[0]), since: s.now.Add(-age), passing: age < problemTime,
					evidence: append([]string{fmt.Sprintf("resource %s %s", name, o.ID)}, problems...)})
			}
			return out
		},
	},
}
