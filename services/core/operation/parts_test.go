package operation

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// notingParts are parts of a step that note that they ran, and that they were undone.
func (n *node) notingParts(names ...string) (parts []Part) {
	for _, name := range names {
		parts = append(parts, Part{
			ID: name, What: "note " + name,
			Run:  func(context.Context, *Progress) error { n.do("%s", name); return nil },
			Undo: func(context.Context, *Progress) error { n.do("undo %s", name); return nil },
		})
	}
	return parts
}

// fans is a step with parts.
func (n *node) fans(atOnce int, parts ...Part) Step {
	return Step{
		ID: "fan", What: "do it on each", Deadline: time.Hour,
		Run:  func(ctx context.Context, p *Progress) error { return p.Each(ctx, atOnce, parts...) },
		Undo: func(ctx context.Context, p *Progress) error { return p.UndoEach(ctx, parts...) },
	}
}

func partStatesOf(o Operation) (states []State) {
	for _, part := range o.Steps[0].Parts {
		states = append(states, part.State)
	}
	return states
}

// The first part that fails ends the step: none is begun after it, what was done is undone,
// the last first, and the error names the part.
func TestPartThatFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		parts := n.notingParts("n1", "n2", "n3", "n4")
		parts[1].Run = func(context.Context, *Progress) error { return Skip("it has it already") }
		parts[2].Run = func(context.Context, *Progress) error { n.do("n3"); return errors.New("no image") }
		n.definitions = []Definition{planned("upgrade", n.fans(1, parts...))}
		n.boot()
		defer n.halt()
		id := n.start("upgrade")
		synctest.Wait()
		o := n.want(id, Failed, Undone)
		if o.Error != "fan: n3: no image" {
			t.Errorf("%q", o.Error)
		}
		n.expect("n1", "n3", "undo n3", "undo n1")
		if diff := cmp.Diff([]State{Undone, Skipped, Undone, Pending}, partStatesOf(o)); diff != "" {
			t.Errorf("parts (-want +got):\n%s", diff)
		}
	})
}

// So many parts run at once; each has its own deadline.
func TestPartsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		var parts []Part
		running, most := 0, 0
		for i := range 5 {
			parts = append(parts, Part{ID: fmt.Sprint(i), What: "wait", Deadline: time.Minute, Run: func(ctx context.Context, p *Progress) error {
				n.mu.Lock()
				running++
				most = max(most, running)
				n.mu.Unlock()
				defer func() {
					n.mu.Lock()
					defer n.mu.Unlock()
					running--
				}()
				if i == 4 {
					<-ctx.Done()
					return ctx.Err()
				}
				time.Sleep(time.Second)
				return nil
			}})
		}
		n.definitions = []Definition{planned("upgrade", n.fans(2, parts...))}
		n.boot()
		defer n.halt()
		id := n.start("upgrade")
		time.Sleep(2 * time.Minute)
		if o := n.want(id, Failed, Undone); !strings.Contains(o.Error, "4: not done within 1m0s") || most != 2 {
			t.Errorf("%d at once, %q", most, o.Error)
		}
	})
}

// After a restart the parts that are done aren't run again, and data is as it was left.
func TestPartsAndDataSurviveARestart(t *testing.T) {
	t.Parallel()
	type image struct {
		Name string
		Size int
	}
	found := Data[[]image]{"images"}
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		boots := 0
		parts := n.notingParts("n1", "n2", "n3")
		parts[1].Run = func(ctx context.Context, p *Progress) error {
			if boots++; boots == 1 {
				<-ctx.Done()
				return ctx.Err()
			}
			images, err := found.Get(p)
			n.do("n2 with %v, %v", images, err)
			return nil
		}
		fan := n.fans(1, parts...)
		look := n.noting("look")
		look.Run = func(_ context.Context, p *Progress) error {
			if _, err := found.Get(p); !errors.Is(err, ErrNoData) {
				t.Errorf("before it was left: %v", err)
			}
			return found.Put(p, []image{{"etcd", 7}})
		}
		n.definitions = []Definition{planned("upgrade", look, fan)}
		n.boot()
		id := n.start("upgrade")
		synctest.Wait()
		n.halt()
		n.boot()
		defer n.halt()
		synctest.Wait()
		o := n.want(id, Done, Done, Done)
		n.expect("n1", "n2 with [{etcd 7}], <nil>", "n3")
		if got := summary(o.Steps[1]); got != "3 of 3 done" {
			t.Errorf("%q", got)
		}
	})
}

// Data that is too large, has a key in it or is too much of it isn't kept.
func TestDataThatIsRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		look := n.noting("look")
		look.Run = func(_ context.Context, p *Progress) error {
			for text, want := range map[string]string{
				strings.Repeat("x", maxValue):             "at most 49152 bytes",
				"-----BEGIN EC PRIVATE KEY-----\nabc\n--": "must hold no secrets",
			} {
				if err := (Data[string]{"text"}).Put(p, text); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			}
			for i := range maxData + 1 {
				if err := (Data[int]{fmt.Sprint("n", i)}).Put(p, i); (err == nil) != (i < maxData) {
					t.Errorf("value %d: %v", i, err)
				}
			}
			return nil
		}
		n.definitions = []Definition{planned("upgrade", look)}
		n.boot()
		defer n.halt()
		id := n.start("upgrade")
		synctest.Wait()
		n.want(id, Done, Done)
	})
}

// summary is how far the parts of a step are: 2 of 3 done, n2: pulls the image.
func summary(s Status) string {
	done := 0
	var now []string
	for _, part := range s.Parts {
		switch part.State {
		case Done, Skipped:
			done++
		case Running:
			now = append(now, part.ID+": "+part.Text)
		case Failed:
			now = append(now, part.ID+" failed")
		}
	}
	return strings.Join(append([]string{fmt.Sprintf("%d of %d done", done, len(s.Parts))}, now...), ", ")
}
