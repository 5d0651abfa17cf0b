// Package hostile has what tests of configurations share: documents that try to
// cost much, and what a document may cost.
package hostile

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config/tree"
)

// dearest is how many times what it takes to read an ordinary document of
// tree.MaxSize any other one may take, whatever is done with it. The worst known
// take 14; what goes up with the square of a size takes thousands.
const dearest = 30

// ordinary is the measure: read once in a run, because what is compared with it
// ran on the same machine, with the same instrumentation, minutes before or after.
var ordinary = sync.OnceValues(func() (time.Duration, error) {
	doc := []byte(Many(func(i int) string { return fmt.Sprintf("key%05d: value%030d # of many\n", i, i) }))
	before, err := cpuTime()
	if err != nil {
		return 0, err
	}
	if _, err := tree.Parse(doc); err != nil {
		return 0, err
	}
	after, err := cpuTime()
	return after - before, err
})

// cpuTime is what the tests have taken of the processor so far: a machine that
// is busy with something else makes nothing slow (getrusage(2)).
func cpuTime() (time.Duration, error) {
	var usage syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), err
}

// Bounded fails the test if work takes more of the processor than it may, and
// returns how many times an ordinary document's it took. Nothing may run in
// parallel.
func Bounded(t testing.TB, work func()) float64 {
	t.Helper()
	unit, err := ordinary()
	if err != nil {
		t.Fatal(err)
	}
	before, err := cpuTime()
	if err != nil {
		t.Fatal(err)
	}
	work()
	after, err := cpuTime()
	if err != nil {
		t.Fatal(err)
	}
	times := float64(after-before) / float64(unit)
	if times > dearest {
		t.Errorf("took %s of the processor: %.0f times what reading an ordinary document takes (%s), not at most %d", after-before, times, unit, dearest)
	}
	return times
}

// Filled repeats a unit between a head and a tail up to the largest document.
func Filled(head, unit, tail string) string {
	return head + strings.Repeat(unit, (tree.MaxSize-len(head)-len(tail))/len(unit)) + tail
}

// Many is almost the largest document, of lines that line makes.
func Many(line func(int) string) string {
	var b strings.Builder
	for i := 0; b.Len() < tree.MaxSize-100; i++ {
		b.WriteString(line(i))
	}
	return b.String()
}

// Deep is a document of so many levels.
func Deep(levels int) string {
	var b strings.Builder
	for i := range levels {
		b.WriteString(strings.Repeat("  ", i) + "a:\n")
	}
	return b.String()
}

// Aliases is a list of nine that stand for nine each, twenty times over: the
// billion laughs. Its last one is called a20.
func Aliases() string {
	var b strings.Builder
	b.WriteString("a0: &a0 [x, x, x, x, x, x, x, x, x]\n")
	for i := range 20 {
		fmt.Fprintf(&b, "a%d: &a%d [%s*a%d]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d, ", i), 8), i)
	}
	return b.String()
}
