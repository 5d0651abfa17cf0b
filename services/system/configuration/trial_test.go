package configuration

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// unkept is a document that the next boot takes from where the first one came from.
func unkept(text []byte) []byte {
	return bytes.Replace(text, []byte("persist: true"), []byte("persist: false"), 1)
}

// S-021: a trial that also changes whether the configuration is kept ends as any
// other, however it ends.
func TestTryOfPersist(t *testing.T) {
	for _, kept := range []bool{true, false} { // before the trial
		for _, end := range []string{"power cut", "time is up", "confirmed"} {
			t.Run(fmt.Sprintf("kept %v, %s", kept, end), func(t *testing.T) {
				start(t, func(p *power, base []byte) {
					medium, before, tried := with(base, "medium"), with(base, "before"), with(base, "tried")
					if kept {
						tried = unkept(tried)
					} else {
						before = unkept(before)
					}
					p.must(Request{Text: before})
					p.must(Request{Text: tried, Mode: Try})
					switch end {
					case "time is up":
						time.Sleep(2 * DefaultTryTimeout) // virtual
						synctest.Wait()
						if p.hostname() != "before" {
							t.Errorf("not undone: %s", p.hostname())
						}
					case "confirmed":
						if err := p.Confirm(t.Context(), "tester"); err != nil {
							t.Fatal(err)
						}
					}
					p.off()
					p.on(medium)
					want := "medium" // STATE is to have none
					switch {
					case kept && end != "confirmed":
						want = "before"
					case !kept && end == "confirmed":
						want = "tried"
					}
					if p.hostname() != want || !p.Situation().Try.IsZero() {
						t.Errorf("the next boot finds %s, not %s", p.hostname(), want)
					}
				})
			})
		}
	}
}

// The history tells that a boot has undone a trial, and what came back.
func TestUndoneByBootIsInTheHistory(t *testing.T) {
	start(t, func(p *power, base []byte) {
		p.must(Request{Text: with(base, "two"), Mode: Try})
		p.again()
		history, err := p.History()
		if err != nil || history[0].Mode != Undone || !history[0].Current || history[0].Summary != "machine.network.hostname" {
			t.Errorf("%+v, %v", history, err)
		}
	})
}

// A trial that the next boot can't read, as another release made it or the disk
// damaged it, is undone by that boot: nobody could reach the node to do it.
func TestUnreadableTrialIsUndone(t *testing.T) {
	for _, damaged := range []bool{false, true} {
		for _, kept := range []bool{true, false} { // before the trial
			start(t, func(p *power, base []byte) {
				medium, before, want := with(base, "medium"), with(base, "before"), "before"
				if !kept {
					before, want = unkept(before), "medium"
				}
				p.must(Request{Text: before})
				if res := p.must(Request{Text: withType(with(base, "two")), Mode: Try}); !res.Rebooting {
					t.Fatal("the change takes no reboot: nothing is tried")
				}
				p.off()
				broken := []byte("version: v1alpha1\nof: the future\n")
				if err := os.WriteFile(p.stored.config(), broken, storeMode); err != nil {
					t.Fatal(err)
				}
				if !damaged {
					j, err := p.stored.readTrial()
					if err != nil {
						t.Fatal(err)
					}
					j.Tried = Digest(broken)
					if err := p.stored.write(tryFile, *j); err != nil {
						t.Fatal(err)
					}
				}
				p.on(medium)
				if p.hostname() != want || !p.Situation().Try.IsZero() {
					t.Errorf("damaged %v, kept %v: the boot has %s, want %s", damaged, kept, p.hostname(), want)
				}
				p.again() // and so has the next
				if p.hostname() != want {
					t.Errorf("damaged %v, kept %v: the boot after that has %s, want %s", damaged, kept, p.hostname(), want)
				}
			})
		}
	}
}

// What an error has left of a trial doesn't undo the same document once it is
// applied for good.
func TestApplyForgetsAnOldJournal(t *testing.T) {
	start(t, func(p *power, base []byte) {
		two := with(base, "two")
		if err := p.stored.write(tryFile, trial{Previous: with(base, "one"), Tried: Digest(two), Timeout: time.Minute}); err != nil {
			t.Fatal(err)
		}
		p.must(Request{Text: two})
		p.again()
		if p.hostname() != "two" {
			t.Errorf("after the reboot: %s", p.hostname())
		}
	})
}

// An undoing that couldn't write is tried again, and is a whole one then.
func TestUndoIsTriedAgain(t *testing.T) {
	start(t, func(p *power, base []byte) {
		p.must(Request{Text: with(base, "two"), Mode: Try})
		away := p.dir + ".away"
		if err := os.Rename(p.dir, away); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * DefaultTryTimeout) // virtual
		synctest.Wait()
		if p.hostname() != "two" {
			t.Errorf("undone without STATE: %s", p.hostname())
		}
		if err := os.Rename(away, p.dir); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * retryUndo)
		synctest.Wait()
		if p.hostname() != "one" || !strings.Contains(p.onDisk(), "hostname: one") || len(p.restarted()) != 2 {
			t.Errorf("undone: %s, restarts %q", p.hostname(), p.restarted())
		}
		if err := p.Confirm(t.Context(), "tester"); !errors.Is(err, ErrNothingToConfirm) {
			t.Errorf("confirmed afterwards: %v", err)
		}
	})
}

// life is what a node's configuration should be, by the rules alone.
type life struct {
	now, disk, staged, before string // documents; before: of what is tried
}

func (l *life) take(text string) {
	l.now, l.disk = text, text
	if strings.Contains(text, "persist: false") {
		l.disk = ""
	}
}

func (l *life) undo() {
	l.take(l.before)
	l.before = ""
}

// boot follows from any end of a node: by order, or the power is gone.
func (l *life) boot(medium string) {
	if l.before != "" {
		l.undo()
	}
	if l.staged != "" {
		l.take(l.staged)
		l.staged = ""
	}
	if l.disk == "" {
		l.take(medium)
	}
	l.now = l.disk
}

// Whatever is done to a configuration in whatever order, memory and disk hold the
// one that the rules say.
func TestLivesOfAConfiguration(t *testing.T) {
	for range 40 {
		seed := rand.Uint64()
		start(t, func(p *power, base []byte) {
			draw := rand.New(rand.NewPCG(seed, 0))
			medium := with(base, "medium")
			var l life
			l.take(string(with(base, "one")))
			var done []string
			for i := range 24 {
				next := with(base, fmt.Sprintf("n%d", i))
				if draw.IntN(3) == 0 {
					next = unkept(next)
				}
				what := []string{"apply", "apply", "try", "try", "try", "stage", "confirm", "roll back", "wait", "boot", "boot"}[draw.IntN(11)]
				done = append(done, what)
				act(t, p, &l, what, next, medium)
				synctest.Wait()
				text, err := p.Text(0)
				onDisk, diskErr := p.stored.read("config.yaml")
				if err != nil || diskErr != nil || string(text) != l.now || string(onDisk) != l.disk {
					t.Fatalf("seed %d, after %q: %v, %v; has:\n%.60s\non disk:\n%.60s\nshould have:\n%.60s\non disk:\n%.60s", seed, done, err, diskErr, text, onDisk, l.now, l.disk)
				}
			}
		})
	}
}

// act does one thing to the node, and to what should come of it.
func act(t *testing.T, p *power, l *life, what string, next, medium []byte) {
	t.Helper()
	apply := func(mode Mode) bool {
		_, err := p.Apply(t.Context(), Request{Text: next, Mode: mode})
		if busy := l.before != ""; err != nil != (busy || mode == OnReboot && bytes.Contains(next, []byte("persist: false"))) {
			t.Fatalf("%s: %v", what, err)
		}
		return err == nil
	}
	switch what {
	case "apply":
		if apply(Auto) {
			l.take(string(next))
			l.staged = ""
		}
	case "try":
		if before := l.now; apply(Try) {
			l.take(string(next))
			l.staged, l.before = "", before
		}
	case "stage":
		if apply(OnReboot) {
			l.staged = string(next)
		}
	case "confirm":
		if err := p.Confirm(t.Context(), "tester"); (err == nil) != (l.before != "") {
			t.Fatalf("confirm: %v", err)
		}
		l.before = ""
	case "roll back", "wait":
		if l.before == "" {
			return
		}
		if what == "wait" {
			time.Sleep(2 * DefaultTryTimeout) // virtual
		} else if _, err := p.Rollback(t.Context(), 0, Request{By: "tester"}); err != nil {
			t.Fatal(err)
		}
		l.undo()
	case "boot":
		p.off()
		p.on(medium)
		l.boot(string(medium))
	}
}
