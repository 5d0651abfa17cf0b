package machine

import (
	"bytes"
	"errors"
	"fmt"
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

// What an error has left of a trial doesn't undo the same document once it is
// applied for good.
func TestApplyForgetsAnOldJournal(t *testing.T) {
	start(t, func(p *power, base []byte) {
		two := with(base, "two")
		if err := p.keep.writeTrial(trial{Previous: with(base, "one"), Tried: digest(two), Timeout: time.Minute}); err != nil {
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
