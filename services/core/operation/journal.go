package operation

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
)

const (
	// format of a journal. One with a higher number is of a newer release: it stays as
	// it is, for that release.
	format = 2
	// keptFinished is how many operations are remembered after their end.
	keptFinished = 20
	// keptBroken is how many unreadable journals are kept, for an investigation.
	keptBroken = 3
	// maxJournal in bytes is more than a journal within all other bounds has.
	maxJournal = 4 << 20
	// maxJournals bounds how many are read at a boot. Those that run and those that
	// are remembered are far fewer.
	maxJournals = 100

	journalSuffix = ".json"
	brokenSuffix  = ".broken"
	journalMode   = 0o600
)

// State is where an operation or a step stands. The names are what users read.
type State string

const (
	Pending State = "pending" // a step whose turn hasn't come
	Running State = "running"
	Undoing State = "undoing"
	Done    State = "done"
	Skipped State = "skipped" // a step that wasn't needed, or optional and failed
	Failed  State = "failed"
	Aborted State = "aborted"
	Undone  State = "undone" // a step, or a part of one
	Moved   State = "moved"  // another node has taken the operation over
)

// Operation is one that runs or ran.
type Operation struct {
	ID       string    `json:"id"`
	Name     string    `json:"name"`
	By       string    `json:"by"` // who asked
	Began    time.Time `json:"began"`
	Ended    time.Time `json:"ended,omitzero"`
	State    State     `json:"state"`
	Error    string    `json:"error,omitempty"` // why it failed or was aborted
	Warnings []string  `json:"warnings,omitempty"`
	Steps    []Status  `json:"steps"`
	// Coordinator is the node that runs a shared operation.
	Coordinator string `json:"coordinator,omitempty"`
	// Elsewhere: another node is its coordinator. Orphaned: that node is gone.
	Elsewhere bool `json:"-"`
	Orphaned  bool `json:"-"`
	// Question is what it waits for an answer to.
	Question *Asked `json:"-"`
	// Role is the least one that may answer and abort.
	Role string `json:"-"`
}

// Status is a step as it is shown and journalled.
type Status struct {
	ID              string        `json:"id"`
	What            string        `json:"what"`
	State           State         `json:"state"`
	Reason          string        `json:"reason,omitempty"` // of Skipped and Failed
	Deadline        time.Duration `json:"deadline"`
	Optional        bool          `json:"optional,omitempty"`
	PointOfNoReturn bool          `json:"pointOfNoReturn,omitempty"`
	Began           time.Time     `json:"began,omitzero"`
	Ended           time.Time     `json:"ended,omitzero"`
	Attempts        int           `json:"attempts,omitempty"`
	UndoAttempts    int           `json:"undoAttempts,omitempty"`
	Parts           []PartStatus  `json:"parts,omitempty"`
}

// becomes puts a step into a state, and returns the event of that.
func (s *Status) becomes(state State, reason string) Event {
	s.State, s.Reason, s.Ended = state, bounded(reason), time.Now()
	return Event{Kind: Changed, Step: s.ID, State: state, Text: reason}
}

// Finished reports whether the operation has ended.
func (o *Operation) Finished() bool { return o.State != Running && o.State != Undoing }

// Current is the step that runs or is undone; nil: none.
func (o *Operation) Current() *Status {
	for i := range o.Steps {
		if s := &o.Steps[i]; s.State == Running || s.State == Undoing {
			return s
		}
	}
	return nil
}

// record is a journal.
type record struct {
	Format int `json:"format"`
	Operation
	Arguments []byte `json:"arguments,omitempty"`
	// Verdict is the state after undoing.
	Verdict State `json:"verdict,omitempty"`
	// Unlocked: it runs without the lock of the cluster.
	Unlocked bool     `json:"unlocked,omitempty"`
	Answers  []answer `json:"answers,omitempty"`
	// Data are the values that steps have left, by key.
	Data map[string]json.RawMessage `json:"data,omitempty"`
	// Term counts how often a node became the coordinator of a shared operation, and Seq
	// the changes: of two copies, the one with the higher term, then the higher Seq, is newer.
	Term uint64 `json:"term,omitempty"`
	Seq  uint64 `json:"seq,omitempty"`
	// Wiped: STATE is gone, and the journal with it.
	Wiped bool `json:"-"`
	// Boots counts how often it was begun or resumed.
	Boots  uint64  `json:"boots"`
	Events []Event `json:"events,omitempty"`
}

type answer struct {
	Step     string    `json:"step"`
	Question string    `json:"question"`
	Text     string    `json:"text"`
	By       string    `json:"by"`
	Time     time.Time `json:"time"`
}

func (r *record) clone() *record {
	next := *r
	next.Steps, next.Answers, next.Warnings = slices.Clone(r.Steps), slices.Clone(r.Answers), slices.Clone(r.Warnings)
	for i := range next.Steps {
		next.Steps[i].Parts = slices.Clone(r.Steps[i].Parts)
	}
	next.Data = make(map[string]json.RawMessage, len(r.Data))
	maps.Copy(next.Data, r.Data)
	return &next
}

// returnable: nothing was begun that can't be undone.
func (r *record) returnable() bool {
	return !slices.ContainsFunc(r.Steps, func(s Status) bool { return s.PointOfNoReturn && s.State != Pending })
}

var (
	operationStates = []State{Running, Undoing, Done, Failed, Aborted, Moved}
	stepStates      = []State{Pending, Running, Undoing, Done, Skipped, Failed, Undone}
)

// errNewer is a journal of a newer release.
var errNewer = errors.New("it is of a newer release")

// decode reads a journal, and checks everything in it.
func decode(data []byte) (*record, error) {
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, err
	}
	if version.Format > format {
		return nil, fmt.Errorf("%w: format %d, and this one knows %d", errNewer, version.Format, format)
	}
	r := new(record)
	if err := json.Unmarshal(data, r); err != nil {
		return nil, err
	}
	if err := r.validate(); err != nil {
		return nil, err
	}
	r.Format = format
	return r, nil
}

func (r *record) validate() error {
	switch {
	case r.Format < 1: // 1 had no parts and no data, and is as good
		return fmt.Errorf("format %d", r.Format)
	case !nameForm.MatchString(r.ID) || !nameForm.MatchString(r.Name):
		return fmt.Errorf("operation %.80q has the ID %.80q", r.Name, r.ID)
	case !slices.Contains(operationStates, r.State):
		return fmt.Errorf("state %.80q", r.State)
	case r.State == Undoing && r.Verdict != Failed && r.Verdict != Aborted:
		return fmt.Errorf("it is undone, and the verdict %.80q", r.Verdict)
	case len(r.Steps) == 0 || len(r.Steps) > maxSteps || len(r.Arguments) > maxArguments || len(r.Events) > maxEvents || len(r.Answers) > maxAnswers || len(r.Warnings) > maxWarnings:
		return fmt.Errorf("%d steps, %d bytes of arguments, %d events, %d answers, %d warnings", len(r.Steps), len(r.Arguments), len(r.Events), len(r.Answers), len(r.Warnings))
	case len(r.Data) > maxData || slices.ContainsFunc(slices.Collect(maps.Values(r.Data)), func(v json.RawMessage) bool { return len(v) > maxValue }):
		return fmt.Errorf("%d values of data", len(r.Data))
	case r.Boots > maxBoots:
		return fmt.Errorf("%d boots", r.Boots)
	}
	seen, running := map[string]bool{}, 0
	for _, s := range r.Steps {
		if !nameForm.MatchString(s.ID) || seen[s.ID] || !slices.Contains(stepStates, s.State) || s.Attempts < 0 || s.UndoAttempts < 0 {
			return fmt.Errorf("step %.80q in state %.80q, begun %d times, undone %d times", s.ID, s.State, s.Attempts, s.UndoAttempts)
		}
		seen[s.ID] = true
		if err := s.validateParts(); err != nil {
			return err
		}
		if s.State == Running || s.State == Undoing {
			running++
		}
	}
	if running > 1 {
		return fmt.Errorf("%d steps at once", running)
	}
	last := uint64(0)
	for _, e := range r.Events {
		if e.Cursor <= last || e.Cursor>>bootShift > r.Boots {
			return fmt.Errorf("event %d after %d", e.Cursor, last)
		}
		last = e.Cursor
	}
	return nil
}

// journals are the files in a directory on STATE.
type journals struct {
	dir  string
	log  *slog.Logger
	file func(path string, data []byte, mode os.FileMode) error // writes one; boot.WriteFile
}

func (j journals) path(id string) string { return filepath.Join(j.dir, id+journalSuffix) }

// write replaces a journal in one step.
func (j journals) write(r *record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if len(data) > maxJournal {
		return fmt.Errorf("write %s: %d bytes are more than a journal may have", j.path(r.ID), len(data))
	}
	return j.file(j.path(r.ID), data, journalMode)
}

// read returns all journals, oldest first. It puts unreadable ones aside, and logs
// that.
func (j journals) read() []*record {
	err := os.MkdirAll(j.dir, 0o700)
	if err == nil {
		err = boot.SyncDir(filepath.Dir(j.dir))
	}
	if err != nil {
		j.log.Error("the journals of operations can't be kept", "err", err)
		return nil
	}
	entries, err := os.ReadDir(j.dir)
	if err != nil {
		j.log.Error("the journals of operations can't be read", "err", err)
		return nil
	}
	var all []*record
	var broken []string
	for _, entry := range entries {
		name := entry.Name()
		switch {
		case strings.HasPrefix(name, "."): // left by a write that the power cut off
			j.remove(name)
		case strings.HasSuffix(name, brokenSuffix):
			broken = append(broken, name)
		case strings.HasSuffix(name, journalSuffix) && len(all) < maxJournals:
			r, err := j.load(name)
			if errors.Is(err, errNewer) {
				j.log.Warn("the journal of an operation is left alone", "file", name, "err", err)
			} else if err != nil {
				j.log.Error("the journal of an operation can't be read, and is put aside", "file", name, "err", err)
				broken = append(broken, j.putAside(name))
			} else {
				all = append(all, r)
			}
		}
	}
	for len(broken) > keptBroken {
		j.remove(broken[0])
		broken = broken[1:]
	}
	slices.SortFunc(all, func(a, b *record) int { return cmp.Or(a.Began.Compare(b.Began), strings.Compare(a.ID, b.ID)) })
	return all
}

// load reads a journal. Another release, or a defect of the disk, may have changed it.
func (j journals) load(name string) (*record, error) {
	data, err := untrusted.ReadFile(filepath.Join(j.dir, name), maxJournal)
	if err != nil {
		return nil, err
	}
	r, err := decode(data)
	if err == nil && r.ID+journalSuffix != name {
		return nil, fmt.Errorf("it is of operation %s", r.ID)
	}
	return r, err
}

func (j journals) putAside(name string) string {
	aside := strings.TrimSuffix(name, journalSuffix) + brokenSuffix
	if err := os.Rename(filepath.Join(j.dir, name), filepath.Join(j.dir, aside)); err != nil {
		j.log.Warn("a journal stays where it is", "err", err)
	}
	return aside
}

// remove is for files that may come back after a power cut.
func (j journals) remove(name string) {
	if err := os.RemoveAll(filepath.Join(j.dir, name)); err != nil {
		j.log.Warn("a journal that isn't needed any more stays", "err", err)
	}
}

// bounded is a text that fits into a journal and a terminal.
func bounded(text string) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' || r >= 0x7f && r < 0xa0 || r == utf8.RuneError {
			return ' '
		}
		return r
	}, text)
	return config.Shorten(text, maxText)
}
