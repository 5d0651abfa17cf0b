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

// goOn is a question that any step may ask.
var goOn = Question{ID: "go-on", Text: "Go on?", Options: []string{"yes", "no"}, Timeout: time.Hour}

// asking is a step that asks, and notes the answer.
func (n *node) asking(q Question) Step {
	s := n.noting("ask")
	s.Run = func(ctx context.Context, p *Progress) error {
		answer, err := p.Ask(ctx, q)
		if err == nil {
			n.do("%s", answer)
		}
		return err
	}
	return s
}

// A person may take longer than the step: its deadline stands still meanwhile.
func TestQuestionStopsTheDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		ask := n.asking(goOn)
		answered := ask.Run
		ask.Run = func(ctx context.Context, p *Progress) error {
			if err := answered(ctx, p); err != nil {
				return err
			}
			<-ctx.Done() // and then goes on
			return ctx.Err()
		}
		n.definitions = []Definition{planned("upgrade", ask)}
		n.boot()
		defer n.halt()
		id := n.start("upgrade")
		time.Sleep(30 * time.Minute)
		o := n.want(id, Running, Running)
		if o.Question == nil || o.Question.Text != "Go on?" || o.Question.Step != "ask" {
			t.Fatalf("it asks %+v", o.Question)
		}
		spec, err := Operations.Get(n.store, id)
		if err != nil || spec.Spec.Question != "Go on?" || spec.Spec.Step != "ask" {
			t.Errorf("%+v, %v", spec.Spec, err)
		}
		for _, wrong := range []struct{ question, text string }{{"go-on", "perhaps"}, {"go-on", ""}, {"other", "yes"}} {
			if err := n.r.Answer(id, wrong.question, wrong.text, "jo"); !errors.As(err, new(Refusal)) {
				t.Errorf("%q to %q: %v", wrong.text, wrong.question, err)
			}
		}
		if err := n.r.Answer(id, "go-on", "yes", "jo"); err != nil {
			t.Fatal(err)
		}
		if err := n.r.Answer(id, "go-on", "no", "eve"); !errors.As(err, new(Refusal)) {
			t.Errorf("the second answer: %v", err)
		}
		if rec := n.journal(id); len(rec.Answers) != 1 || rec.Answers[0].Text != "yes" || rec.Answers[0].By != "jo" {
			t.Errorf("the journal has %+v", rec.Answers)
		}
		time.Sleep(59 * time.Second)
		n.expect("yes")
		n.want(id, Running, Running)
		time.Sleep(2 * time.Second)
		if o := n.want(id, Failed, Undone); o.Question != nil || !strings.Contains(o.Error, "not done within 1m0s") {
			t.Errorf("%q, %+v", o.Error, o.Question)
		}
	})
}

func TestAnswerSurvivesARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		ask := n.asking(goOn)
		answered := ask.Run
		boots := 0
		ask.Run = func(ctx context.Context, p *Progress) error {
			boots++
			if err := answered(ctx, p); err != nil || boots > 2 {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		}
		n.definitions = []Definition{planned("upgrade", ask)}
		n.boot()
		id := n.start("upgrade")
		synctest.Wait()
		n.halt() // the question is open
		n.boot()
		synctest.Wait()
		if err := n.r.Answer(id, "go-on", "no", "jo"); err != nil { // asked again
			t.Fatal(err)
		}
		synctest.Wait()
		n.halt()
		n.boot() // nobody is asked
		defer n.halt()
		synctest.Wait()
		n.expect("no", "no")
		n.want(id, Done, Done)
	})
}

func TestQuestionThatNobodyAnswers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fallback string
		state    State
		step     State
	}{"fails": {"", Failed, Undone}, "has a default": {"no", Done, Done}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				q := goOn
				q.Default = c.fallback
				n.definitions = []Definition{planned("upgrade", n.asking(q))}
				n.boot()
				defer n.halt()
				id := n.start("upgrade")
				time.Sleep(q.Timeout + time.Second)
				o := n.want(id, c.state, c.step)
				if o.Question != nil || c.state == Failed && !strings.Contains(o.Error, `nobody has answered "Go on?"`) {
					t.Errorf("%q, %+v", o.Error, o.Question)
				}
			})
		})
	}
}

func TestAbortWhileAsking(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.definitions = []Definition{planned("upgrade", n.asking(goOn))}
		n.boot()
		defer n.halt()
		id := n.start("upgrade")
		synctest.Wait()
		if err := n.r.Abort(id, "jo"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if o := n.want(id, Aborted, Undone); o.Question != nil {
			t.Errorf("it still asks %+v", o.Question)
		}
		n.expect("undo ask")
	})
}

// Who comes late or again hears what they haven't delivered, over restarts too, and
// nothing twice.
func TestWatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		boots := 0
		chatty := n.noting("chatty")
		chatty.Run = func(ctx context.Context, p *Progress) error {
			boots++
			p.Report("boot %d", boots)
			if boots == 2 {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		n.definitions = []Definition{planned("reset", chatty)}
		n.boot()
		id := n.start("reset")
		var texts []string
		var cursor uint64
		hear := func(u Update) error {
			for _, e := range u.Events {
				if e.Cursor <= cursor {
					t.Errorf("cursor %d after %d", e.Cursor, cursor)
				}
				cursor = e.Cursor
				if e.Kind == Said {
					texts = append(texts, e.Text)
				}
			}
			return nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		delivered := make(chan error)
		go func() { delivered <- n.r.Watch(ctx, id, 0, hear) }()
		synctest.Wait()
		cancel()
		if err := <-delivered; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		n.halt()
		n.boot()
		defer n.halt()
		if err := n.r.Watch(t.Context(), id, cursor, hear); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff([]string{"boot 1", "goes on after a restart of the node", "boot 2"}, texts); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if err := n.r.Watch(t.Context(), "reset-x", 0, hear); !errors.Is(err, ErrNotFound) {
			t.Errorf("what isn't there: %v", err)
		}
	})
}

// A step that talks without end costs no more than its last words.
func TestStoryIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		chatty := n.noting("chatty")
		chatty.Run = func(_ context.Context, p *Progress) error {
			for i := range 10 * maxEvents {
				p.Report("%d\x1b[2J %s", i, strings.Repeat("x", 2*maxText))
			}
			return nil
		}
		n.definitions = []Definition{planned("reset", chatty)}
		n.boot()
		defer n.halt()
		id := n.start("reset")
		synctest.Wait()
		n.want(id, Done, Done)
		rec := n.journal(id)
		if len(rec.Events) != maxEvents {
			t.Errorf("%d events are kept, want %d", len(rec.Events), maxEvents)
		}
		for _, e := range rec.Events {
			if len(e.Text) > maxText+len("…") || strings.ContainsRune(e.Text, 0x1b) {
				t.Fatalf("%q", e.Text)
			}
		}
		var lost bool
		if err := n.r.Watch(t.Context(), id, 0, func(u Update) error { lost = u.Lost; return nil }); err != nil || !lost {
			t.Errorf("lost %v, %v", lost, err)
		}
		if err := n.r.Watch(t.Context(), id, rec.Events[0].Cursor, func(u Update) error { lost = u.Lost; return nil }); err != nil || lost {
			t.Errorf("lost %v, %v", lost, err)
		}
	})
}

// The last word gets to those who watch before the node ends, however slow they are,
// and nobody keeps the node from ending.
func TestStepThatEndsTheNode(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]time.Duration{"quick": 0, "slow": time.Second / 2, "asleep": time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				var last Update
				end := n.noting("restart")
				end.EndsNode = true
				ended := make(chan struct{})
				end.Run = func(context.Context, *Progress) error {
					n.do("restart, %v", last.Operation.State == Done)
					if rec := n.journal(n.only()); rec.State != Done || rec.Steps[1].State != Done {
						t.Errorf("before it ends, the journal says %s", rec.State)
					}
					close(ended)
					return nil
				}
				drain := n.noting("drain")
				drain.Run = func(context.Context, *Progress) error { time.Sleep(2 * time.Second); n.do("drain"); return nil }
				n.definitions = []Definition{planned("reboot", drain, end)}
				n.boot()
				id := n.start("reboot")
				ctx, cancel := context.WithCancel(t.Context())
				watched := make(chan error, 1)
				go func() {
					watched <- n.r.Watch(ctx, id, 0, func(u Update) error {
						select {
						case <-time.After(slow):
						case <-ctx.Done():
							return ctx.Err()
						}
						last = u
						return nil
					})
				}()
				<-ended
				n.halt()
				cancel()
				<-watched
				n.expect("drain", fmt.Sprintf("restart, %v", slow < watcherBudget))
				n.boot()
				defer n.halt()
				synctest.Wait()
				n.want(id, Done, Done, Done)
				if len(n.did) != 2 {
					t.Errorf("it was done again: %q", n.did)
				}
			})
		})
	}
}

// Steps after the one that restarts the node run at the next boot.
func TestOperationOverARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		restart := n.noting("restart")
		restart.EndsNode = true
		n.definitions = []Definition{planned("reboot", n.noting("cordon"), restart, n.noting("uncordon"))}
		n.boot()
		id := n.start("reboot")
		time.Sleep(2 * watcherBudget)
		n.want(id, Running, Done, Done, Pending)
		n.halt()
		n.boot()
		defer n.halt()
		synctest.Wait()
		n.want(id, Done, Done, Done, Done)
		n.expect("cordon", "restart", "uncordon")
	})
}

func TestNodeThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		restart := n.noting("restart")
		restart.EndsNode, restart.Undo = true, nil
		n.definitions = []Definition{planned("reboot", n.noting("cordon"), restart)}
		n.boot()
		defer n.halt()
		id := n.start("reboot")
		time.Sleep(restart.Deadline + 2*watcherBudget)
		if o := n.want(id, Failed, Undone, Failed); !strings.Contains(o.Error, "hasn't ended within 1m0s") {
			t.Errorf("%q", o.Error)
		}
		n.expect("cordon", "restart", "undo cordon")
	})
}
