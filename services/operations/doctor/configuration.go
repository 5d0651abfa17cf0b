package doctor

import (
	"fmt"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
)

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
