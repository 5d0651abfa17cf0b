package containerd

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

// An image is pulled once at a time, for as long as somebody asks for it, with pauses. What is wrong is said until it
// is here.
func TestWishIsAskedForAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var w wishes
		const image = "registry.test/x:1"
		var tries []time.Duration
		began, missing := time.Now(), reason.With(ImageNotFound, errors.New("pull image x: not found"))
		pull := func() error {
			tries = append(tries, time.Since(began))
			time.Sleep(10 * time.Second)
			return missing
		}
		for range 200 {
			want := Pulling
			if time.Since(began) >= 10*time.Second {
				want = ImageNotFound
			}
			if err := w.ask(image, pull); reason.Of(err) != want {
				t.Fatalf("after %s: %v, want the reason %s", time.Since(began), err, want)
			}
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if n := len(tries); n != 8 || tries[1] != 25*time.Second {
			t.Errorf("tried at %v", tries)
		}
		missing = nil
		time.Sleep(time.Minute)
		_ = w.ask(image, pull)
		time.Sleep(11 * time.Second)
		if err := w.ask("another", pull); reason.Of(err) != Pulling {
			t.Error(err)
		}
		if _, still := w.missing.Load(image); still {
			t.Error("an image that was pulled is missing")
		}
		time.Sleep(time.Minute)
	})
}
