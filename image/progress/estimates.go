package progress

import (
	"encoding/json"
	"os"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
)

// scaleLimit keeps one odd step from turning all estimates into nonsense: a step may take up to this many times longer, or shorter.
const scaleLimit = 4

// estimates knows how long steps took, last time and in this run. The owner's mutex guards it.
type estimates struct {
	file  string // "": not kept
	last  map[string]time.Duration
	guess map[string]time.Duration // for steps without a last time

	took, predicted time.Duration // sums over the steps of this run that had a prediction
}

// loadEstimates reads what the last runs left. A missing or broken file is a first run: estimates aren't worth an error.
func loadEstimates(file string) *estimates {
	e := &estimates{file: file, last: map[string]time.Duration{}, guess: map[string]time.Duration{}}
	for name, seconds := range readSeconds(file) {
		e.last[name] = time.Duration(seconds * float64(time.Second))
	}
	return e
}

func readSeconds(file string) map[string]float64 {
	seconds := map[string]float64{}
	if content, err := os.ReadFile(file); err == nil {
		_ = json.Unmarshal(content, &seconds)
	}
	return seconds
}

func (e *estimates) unscaled(name string) (time.Duration, bool) {
	if d, known := e.last[name]; known {
		return d, true
	}
	d, known := e.guess[name]
	return d, known
}

// of estimates a step's duration, by its last one and by how this run has gone so far.
func (e *estimates) of(name string) (time.Duration, bool) {
	d, known := e.unscaled(name)
	if !known {
		return 0, false
	}
	scale := 1.0
	if e.predicted > 0 {
		scale = min(max(float64(e.took)/float64(e.predicted), 1.0/scaleLimit), scaleLimit)
	}
	return time.Duration(float64(d) * scale), true
}

// record notes how long a step took, and saves it. Steps too short to be shown are left out of the scale: they are mostly noise.
func (e *estimates) record(name string, took time.Duration) {
	if predicted, known := e.unscaled(name); known && took >= showAfter {
		e.took += took
		e.predicted += predicted
	}
	e.last[name] = took
	if e.file != "" {
		e.save(name, took)
	}
}

// save adds one duration to the file. Another run may have written meanwhile, so it is read again; should the two still collide, one
// duration is lost and the next run brings it back. Therefore errors don't matter either.
func (e *estimates) save(name string, took time.Duration) {
	seconds := readSeconds(e.file)
	seconds[name] = took.Seconds()
	content, err := json.MarshalIndent(seconds, "", "\t")
	if err != nil {
		return
	}
	if os.MkdirAll(filepath.Dir(e.file), 0o755) != nil {
		return
	}
	_ = boot.WriteFile(e.file, append(content, '\n'), 0o644)
}
