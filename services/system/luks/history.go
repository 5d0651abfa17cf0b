package luks

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
)

// A History is a file on STATE that has when each slot last opened its volume, by label. A boot tries the keys until
// one opens it.
type History string

func (h History) read() (times map[string]map[int]time.Time, err error) {
	text, err := os.ReadFile(string(h))
	if err == nil {
		err = json.Unmarshal(text, &times)
	}
	return times, boot.IgnoreMissing(err)
}

// Note adds what the layer has done since the last call to its history. STATE is mounted.
func (l *Layer) Note() error {
	if len(l.uses) == 0 {
		return nil
	}
	times, err := l.History.read()
	if err != nil || times == nil {
		times = map[string]map[int]time.Time{} // a damaged file has no more than this
	}
	if times[l.Label] == nil {
		times[l.Label] = map[int]time.Time{}
	}
	maps.Copy(times[l.Label], l.uses)
	maps.DeleteFunc(times[l.Label], func(_ int, at time.Time) bool { return at.IsZero() })
	text, err := json.Marshal(times)
	if err = errors.Join(err, boot.WriteFile(string(l.History), append(text, '\n'), 0o600)); err == nil {
		l.uses = nil
	}
	return err
}

// used notes when a slot has opened the volume; zero: it has another key, which has opened nothing yet.
func (l *Layer) used(slot int, at time.Time) {
	if l.uses == nil {
		l.uses = map[int]time.Time{}
	}
	l.uses[slot] = at
}

// text has those of some slots that have opened a volume, with the times.
func (h History) text(label string, slots []int) (string, error) {
	times, err := h.read()
	var all []string
	for _, slot := range slots {
		if at, ok := times[label][slot]; ok {
			all = append(all, fmt.Sprintf("%d %s", slot, at.UTC().Format(time.RFC3339)))
		}
	}
	return strings.Join(all, ", "), err
}
