package eventually

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// A product under test takes the processors or the disk for itself. What it is too late
// for, it stays too late for.
func TestTheProductDoesNotExcuseItself(t *testing.T) {
	const promise = 10 * time.Second
	for name, work := range map[string]func(t *testing.T, end chan struct{}){"processors": calculate, "disk": write} {
		t.Run(name, func(t *testing.T) {
			before := Measure()
			start := time.Now().Add(-time.Hour)
			late := start.Add(time.Duration(1.01 * float64(promise) * float64(before)))
			if before.Kept(start, late, promise) == nil {
				t.Fatal("the promise is kept with nothing going on")
			}
			end := make(chan struct{})
			var product sync.WaitGroup
			for range 2 * runtime.NumCPU() {
				product.Go(func() { work(t, end) })
			}
			again() // as a wait of the test does meanwhile
			during := Measure()
			close(end)
			product.Wait()
			if before.Kept(start, late, promise) == nil {
				t.Error("the product made the machine slow, and the promise is kept")
			}
			t.Logf("%.1f times slower before, and %.1f meanwhile", before, during)
			// The twin: somebody else made it as slow before the product began. A disk in
			// memory doesn't become slow, nor does a machine that is as slow as can be.
			if during < before*1.1 && (name == "disk" || before > slowest/2) {
				return
			}
			if err := during.Kept(start, late, promise); err != nil {
				t.Errorf("the machine was slow before: %v", err)
			}
		})
	}
}

func calculate(_ *testing.T, end chan struct{}) {
	for {
		select {
		case <-end:
			return
		default:
			processor()
		}
	}
}

func write(t *testing.T, end chan struct{}) {
	f, err := os.CreateTemp(t.TempDir(), filepath.Base(t.Name()))
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Close()
	for {
		select {
		case <-end:
			return
		default:
		}
		if _, err := f.WriteAt(make([]byte, 1<<20), 0); err != nil {
			t.Error(err)
			return
		}
		if err := f.Sync(); err != nil {
			t.Error(err)
			return
		}
	}
}

func TestPace(t *testing.T) {
	t.Parallel()
	probe := func(found ...float64) func() float64 {
		i := -1
		return func() float64 { i++; return found[i%len(found)] }
	}
	for _, tc := range []struct {
		what            string
		processor, disk func() float64
		want            Pace
	}{
		{"a faster machine", probe(0.5), probe(0.1), 1},
		{"a slow processor", probe(3), probe(1), 3},
		{"a slow disk", probe(1), probe(3), 3},
		{"blips", probe(1, 8, 1, 7, 1), probe(0.1, 0.1, 100, 0.1, 0.1), 1},
		{"slow but for a moment", probe(2, 1, 2, 2, 2), probe(1), 2},
		{"a machine that stands still", probe(1000), probe(1), slowest},
	} {
		if got := median(tc.processor, tc.disk); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.what, got, tc.want)
		}
	}
}

func TestKept(t *testing.T) {
	t.Parallel()
	start := time.Now()
	for _, tc := range []struct {
		pace Pace
		took time.Duration
		kept bool
	}{
		{1, 10 * time.Second, true}, {1, 10*time.Second + 1, false}, {1.5, 15 * time.Second, true}, {1.5, 15*time.Second + 1, false},
	} {
		err := tc.pace.Kept(start, start.Add(tc.took), 10*time.Second)
		if (err == nil) != tc.kept {
			t.Errorf("%s at a pace of %v: %v", tc.took, tc.pace, err)
		}
		for _, part := range []string{"it took", "10s are promised", "times slower"} {
			if err != nil && !strings.Contains(err.Error(), part) {
				t.Errorf("%q isn't in: %v", part, err)
			}
		}
	}
}
