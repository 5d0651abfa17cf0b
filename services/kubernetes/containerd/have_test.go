package containerd

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

// An image is pulled once at a time, for as long as somebody asks for it, with pauses that grow. What is wrong is said until it is here.
func TestWishIsAskedForAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var w wishes
		image := [2]string{Namespace, "registry.test/x:1"}
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
			if err := w.ask(image, false, pull); reason.Of(err) != want {
				t.Fatalf("after %s: %v, want the reason %s", time.Since(began), err, want)
			}
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if n := len(tries); n < 6 || n > 8 || tries[1] < 11*time.Second || tries[n-1]-tries[n-2] < wishMax {
			t.Errorf("tried at %v", tries)
		}
		if err := w.ask(image, true, pull); err != nil || len(w.all) != 0 {
			t.Errorf("once it is here: %v, and %d images are remembered", err, len(w.all))
		}
	})
}
