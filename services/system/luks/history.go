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
// one opens it. Nothing depends on the file: one that can't be read or written has no times.
type History string

func (h History) read() map[string]map[int]time.Time {
	times := map[string]map[int]time.Time{}
	if text, err := os.ReadFile(string(h)); err != nil || json.Unmarshal(text, &times) != nil || times == nil {
		return map[string]map[int]time.Time{}
	}
	return times
}

// Note adds what the layer has done since the last call to its history. STATE is mounted.
func (l *Layer) Note() {
	if len(l.uses) == 0 {
		return
	}
	times := l.History.read()
	if times[l.Label] == nil {
		times[l.Label] = map[int]time.Time{}
	}
	maps.Copy(times[l.Label], l.uses)
	maps.DeleteFunc(times[l.Label], func(_ int, at time.Time) bool { return at.IsZero() })
	l.uses = nil
	text, err := json.Marshal(times)
	if err = errors.Join(err, boot.WriteFile(string(l.History), append(text, '\n'), 0o600)); err != nil {
		l.Log.Warn(fmt.Sprintf("when a key has opened %s isn't kept: %v", l.Label, err))
	}
}

// used notes when a slot has opened the volume; zero: it has another key, which has opened nothing yet.
func (l *Layer) used(slot int, at time.Time) {
	if l.uses == nil {
		l.uses = map[int]time.Time{}
	}
	l.uses[slot] = at
}

// text has those of some slots that have opened a volume, with the times.
func (h History) text(label string, slots []int) string {
	times := h.read()[label]
	var all []string
	for _, slot := range slots {
		if at, ok := times[slot]; ok {
			all = append(all, fmt.Sprintf("%d %s", slot, at.UTC().Format(time.RFC3339)))
		}
	}
	return strings.Join(all, ", ")
}
