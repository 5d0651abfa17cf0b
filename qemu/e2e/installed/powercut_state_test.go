//go:build e2e && long

package installed

import (
	"bytes"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// stateCuts is at how many points of the writes to STATE the power is cut.
const stateCuts = 30

// stateSurvives cuts the power at many points of the writes to STATE, and mounts the file system, as the next boot does
// it. From the moment on at which it has a configuration, it has a whole one, and never one that is older than the disk
// has for certain. Before the writes, the disk had the content of base; "": it was empty.
func stateSurvives(t *testing.T, base string, all []write, capacity int64) {
	t.Helper()
	if known, err := os.ReadFile("/proc/filesystems"); err != nil || !strings.Contains(string(known), "\txfs\n") {
		t.Errorf("the data of STATE can't be checked: the kernel of this machine has no xfs (modprobe xfs): %v", err)
		return
	}
	places := boot.Places(capacity)
	place := places[slices.IndexFunc(places, func(p boot.Place) bool { return p.Label == boot.LabelState })]
	all = within(all, place)
	image := partOf(t, base, place, place.Size)
	defer image.Close()
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	points := make([]int, stateCuts)
	for j := range points {
		points[j] = random.IntN(len(all)) + 1
	}
	slices.Sort(points)
	t.Logf("%d writes to STATE, seed %d", len(all), seed)
	var versions [][]byte
	kept, sure := 0, -1
	look := func(point int, what string) (version int) {
		text, err := configurationOn(t, image.Name())
		if err == nil {
			_, _, err = config.Load(boot.ConfigFile, text)
		}
		version = slices.IndexFunc(versions, func(v []byte) bool { return bytes.Equal(v, text) })
		switch {
		case err != nil && sure < 0:
			return -1 // there is no configuration yet
		case err != nil:
			t.Errorf("write %d of %d, %s, seed %d: %v", point, len(all), what, seed, err)
			return sure
		case version < 0:
			versions = append(versions, text)
			return len(versions) - 1
		case version < sure:
			t.Errorf("write %d of %d, %s, seed %d: configuration %d is there again, after %d", point, len(all), what, seed, version, sure)
		}
		return version
	}
	if base != "" {
		sure = look(0, "before the first write")
	}
	for _, point := range points {
		last := kept // the last flush
		for j := kept; j < point; j++ {
			if all[j].flush {
				last = j + 1
			}
		}
		for _, w := range all[kept:last] {
			if w.size > 0 {
				w.apply(t, image, w.size)
			}
		}
		kept = last
		sure = max(sure, look(point, "after a flush"))
		var undo []func()
		for _, w := range all[kept:point] {
			if some := random.Int64N(3*w.size/logSector+1) * logSector; w.size > 0 && some > 0 {
				undo = append(undo, w.apply(t, image, min(some, w.size)))
			}
		}
		look(point, "with a part of what wasn't flushed")
		for _, f := range slices.Backward(undo) {
			f()
		}
	}
	if sure < 0 {
		t.Error("STATE never had a configuration")
	}
	t.Logf("STATE was looked at %d times, and had %d configurations", 2*len(points), len(versions))
}

// within are the writes to a place, relative to its start, and all flushes.
func within(all []write, place boot.Place) (own []write) {
	for _, w := range all {
		start, end := max(w.at, place.Start), min(w.at+w.size, place.Start+place.Size)
		if start >= end {
			if w.flush {
				own = append(own, write{flush: true, log: w.log})
			}
			continue
		}
		w.from += start - w.at
		w.at, w.size = start-place.Start, end-start
		own = append(own, w)
	}
	return own
}

// configurationOn mounts a copy of an xfs, which so replays its log, and returns the configuration that it has.
func configurationOn(t *testing.T, image string) (text []byte, err error) {
	t.Helper()
	work := t.TempDir()
	scratch, dir := filepath.Join(work, "copy"), filepath.Join(work, "mounted")
	defer os.Remove(scratch)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := e2etest.CopySparse(t.Context(), image, scratch); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mount", "-t", "xfs", "-o", "loop", scratch, dir).CombinedOutput(); err != nil {
		return nil, errors.New(string(out))
	}
	text, err = os.ReadFile(filepath.Join(dir, filepath.Base(boot.ConfigFile)))
	if errors.Is(err, fs.ErrNotExist) {
		err = errors.New("no configuration")
	}
	if out, e := exec.Command("umount", dir).CombinedOutput(); e != nil {
		t.Fatalf("umount: %v: %s", e, out)
	}
	return text, err
}
