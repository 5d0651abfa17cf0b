package doctor

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
)

// tailLines of a log are searched for the last error: etcd prints its whole usage
// after the line with the error.
const tailLines = 400

// errorPatterns match lines with the reason why a program ended, the surest first: fatal
// errors, then any error, then warnings, in the formats of the node's programs (klog as
// text and as JSON, zap, Go's flag and log packages).
var errorPatterns = []*regexp.Regexp{
	regexp.MustCompile(`command failed|"level":"(?:fatal|panic)"|^panic: |flag provided but not defined|unknown flag|invalid value .* for flag|^F\d{4} |[Ff]atal error`),
	regexp.MustCompile(`"level":"error"|^E\d{4} |^(?:stderr F )?Error: |"err":"`),
	regexp.MustCompile(`"level":"warn"|^W\d{4} |\bwarning: |\berror: `),
	regexp.MustCompile(`\S`), // without an error, the last line
}

// criLine matches the time and stream that CRI puts before each line of a container's
// output.
var criLine = regexp.MustCompile(`^\S+Z? (?:stdout|stderr) [FP] `)

// eventLine matches lines of a service's log that repeat its events.
var eventLine = regexp.MustCompile(`^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d  .* state=\w+$`)

// lastError is the line with the most likely reason why something ended: the last line
// that matches the surest pattern. It is "" if there are no lines.
func lastError(lines []string) string {
	lines = slices.DeleteFunc(slices.Clone(lines), eventLine.MatchString)
	for _, kind := range errorPatterns {
		for _, line := range slices.Backward(lines) {
			if kind.MatchString(criLine.ReplaceAllString(line, "")) {
				return line
			}
		}
	}
	return ""
}

// fatal reports whether a line is why a program ended.
func fatal(line string) bool { return errorPatterns[0].MatchString(criLine.ReplaceAllString(line, "")) }

// maxWords of a program are repeated as a cause, in bytes.
const maxWords = 400

// wrongFlags are how programs refuse an argument; the group is its name.
var wrongFlags = []*regexp.Regexp{
	regexp.MustCompile(`unknown (?:shorthand )?flag: -*([\w-]+)`),
	regexp.MustCompile(`flag provided but not defined: -*([\w-]+)`),
	regexp.MustCompile(`invalid argument .+? for \\?"(?:-\w, )?--([\w-]+)\\?" flag`),
	regexp.MustCompile(`invalid (?:boolean )?value .+? for (?:flag )?-*([\w-]+)`),
}

// wrongFlag is the argument that a program refused, "" if none.
func wrongFlag(words string) string {
	for _, w := range wrongFlags {
		if m := w.FindStringSubmatch(words); m != nil {
			return m[1]
		}
	}
	return ""
}

// explainArgument returns which of the configuration's arguments a program refused, and
// where to correct it; false if words, the program's message, mentions none. Arguments
// that are mentioned in another form than the flag are found by their names.
func explainArgument(words, path, image string, extra config.Args) (why, next string, ok bool) {
	flag := wrongFlag(words)
	if _, own := extra[flag]; flag != "" && !own {
		return fmt.Sprintf("%s doesn't know the argument %s, which Garboard sets: the release of the image doesn't fit.", image, flag),
			"Use an image of a supported release.", true
	}
	if flag == "" {
		flag = named(words, extra)
	}
	if flag == "" {
		return "", "", false
	}
	return fmt.Sprintf("%s has %s: %q, which the program refuses.", path, flag, extra.Get(flag)),
		fmt.Sprintf("Correct or remove %s in %s (gbctl -n ADDRESS edit mc).", flag, path), true
}

// Shorter names and values stand in a line by chance.
const (
	minName  = 4
	minValue = 8
)

// named is the argument that the words name: as it is written, or in plain words
// ("feature gates"), or by its value. "" if none.
func named(words string, extra config.Args) string {
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		plain := regexp.QuoteMeta(name) + "|" + regexp.QuoteMeta(strings.ReplaceAll(name, "-", " "))
		if len(name) >= minName && regexp.MustCompile(`(?:^|[^\w-])(?:--)?(?:`+plain+`)(?:[^\w-]|$)`).MatchString(words) {
			return name
		}
		if slices.ContainsFunc(extra[name], func(value string) bool { return len(value) >= minValue && strings.Contains(words, value) }) {
			return name
		}
	}
	return ""
}

// asLog is a line of a log as evidence.
func asLog(id, line string) string {
	if line == "" {
		return ""
	}
	return "logs " + id + ": " + line
}

// asEvent is an event as evidence.
func asEvent(e dag.Event) string {
	return fmt.Sprintf("service %s: [%s]: %s", e.Service, e.State, e.Message)
}

// asStatus is where a service stands, as evidence.
func (svc service) asStatus() string {
	return fmt.Sprintf("service %s: [%s]: %s", svc.ID, svc.State, svc.Message)
}

// failures are a service's ends within the last d, oldest first.
func (s *snapshot) failures(svc service, d time.Duration) (out []dag.Event) {
	for _, e := range svc.events {
		if e.State == dag.Finished { // it was stopped, and begins anew
			out = nil
		}
		if e.State == dag.Failed && s.sinceBoot-e.SinceBoot <= d {
			out = append(out, e)
		}
	}
	return out
}

// asFailure is a controller's failure as evidence.
func asFailure(o resource.Object[resource.Failure]) string {
	return fmt.Sprintf("resource ControllerFailures %s: since %s: %s", o.ID, stamp(o.Spec.Since), o.Spec.Error)
}

// syncing is how old the kubelet's last line about a pod may be: it tries again within
// some ten seconds.
const syncing = 2 * time.Minute

// syncError is what the kubelet's log says last about a pod of kube-system that it
// can't run: the error, and the line.
func syncError(lines []string, pod string, now time.Time) (err, line string) {
	for _, l := range slices.Backward(lines) {
		if !strings.Contains(l, "Error syncing pod") || !strings.Contains(l, pod) {
			continue
		}
		var entry struct {
			Milliseconds float64 `json:"ts"`
			Err          string  `json:"err"`
		}
		if json.Unmarshal([]byte(l), &entry) != nil || now.Sub(time.UnixMilli(int64(entry.Milliseconds))) > syncing {
			break // cut short, or mended since
		}
		return entry.Err, l
	}
	return "", ""
}
