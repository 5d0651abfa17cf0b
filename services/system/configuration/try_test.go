package configuration

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// The duty that matters most: a bad change of a remote node undoes itself.
func TestTryUndoesItself(t *testing.T) {
	start(t, func(p *power, base []byte) {
		res := p.must(Request{Text: with(base, "two"), Mode: Try, TryTimeout: time.Minute})
		if p.hostname() != "two" || !res.Deadline.Equal(time.Now().Add(time.Minute)) || p.Situation().Try.IsZero() {
			t.Errorf("trying: %+v", res)
		}
		if _, err := p.Apply(t.Context(), Request{Text: with(base, "three")}); !errors.Is(err, ErrBusy) {
			t.Errorf("applied in between: %v", err)
		}
		time.Sleep(59 * time.Second) // virtual
		synctest.Wait()
		if p.hostname() != "two" {
			t.Error("undone too early")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if p.hostname() != "one" || !strings.Contains(p.onDisk(), "hostname: one") || !p.Situation().Try.IsZero() {
			t.Errorf("not undone: %s", p.hostname())
		}
		if want := []string{"kubelet", "kubelet"}; !slices.Equal(p.restarted(), want) {
			t.Errorf("restarts %q", p.restarted())
		}
		if err := p.Confirm(t.Context(), "tester"); !errors.Is(err, ErrNothingToConfirm) {
			t.Errorf("confirmed afterwards: %v", err)
		}
		p.again()
		if p.hostname() != "one" {
			t.Errorf("after a reboot: %s", p.hostname())
		}
	})
}

func TestTryConfirmed(t *testing.T) {
	start(t, func(p *power, base []byte) {
		p.must(Request{Text: with(base, "two"), Mode: Try})
		if err := p.Confirm(t.Context(), "tester"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * MaxTryTimeout)
		synctest.Wait()
		p.again()
		if p.hostname() != "two" {
			t.Errorf("a confirmed change is gone: %s", p.hostname())
		}
	})
}

// A live try that meets a reboot, or a power cut, is over.
func TestTryIsUndoneByReboot(t *testing.T) {
	start(t, func(p *power, base []byte) {
		p.must(Request{Text: with(base, "two"), Mode: Try})
		p.again()
		if p.hostname() != "one" || !p.Situation().Try.IsZero() {
			t.Errorf("after the power cut: %s", p.hostname())
		}
	})
}

// A try of what takes a reboot: the boot is the trial, its clock runs from then on.
func TestTryWithReboot(t *testing.T) {
	for _, end := range []string{"time is up", "another reboot", "confirmed", "rolled back"} {
		t.Run(end, func(t *testing.T) {
			start(t, func(p *power, base []byte) {
				res := p.must(Request{Text: withType(with(base, "two")), Mode: Try, TryTimeout: 5 * time.Minute})
				if !res.Rebooting || len(p.rebooted()) != 1 || !res.Deadline.IsZero() {
					t.Fatalf("%+v", res)
				}
				time.Sleep(10 * time.Minute) // a slow machine
				p.again()
				time.Sleep(4 * time.Minute)
				synctest.Wait()
				if p.hostname() != "two" {
					t.Fatalf("on trial: %s", p.hostname())
				}
				want := "one"
				switch end {
				case "time is up":
					time.Sleep(2 * time.Minute)
					synctest.Wait()
					if len(p.rebooted()) != 1 {
						t.Fatalf("undoing takes a reboot, too: %q", p.rebooted())
					}
				case "rolled back":
					if res, err := p.Rollback(t.Context(), 0, Request{By: "tester"}); err != nil || !res.Rebooting {
						t.Fatalf("%+v, %v", res, err)
					}
				case "confirmed":
					want = "two"
					if err := p.Confirm(t.Context(), "tester"); err != nil {
						t.Fatal(err)
					}
				}
				p.again()
				if p.hostname() != want {
					t.Errorf("in the end: %s, want %s", p.hostname(), want)
				}
			})
		})
	}
}
