// Package fuzzdata is for the tests of configurations: documents that are expensive to
// process, and a check of how much processor time a document may take.
package fuzzdata

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config/tree"
)

// maxCost limits the processor time of any operation on a document, as a multiple of
// the time that parsing an ordinary document of tree.MaxSize takes. The most expensive
// known documents take 14; quadratic algorithms take thousands.
const maxCost = 30

// ordinary is the unit of cost: the time to parse an ordinary document. It is measured once
// in a run: the other measurements are from the same machine, with the same
// instrumentation, minutes before or after.
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

// cpuTime returns the processor time that the tests have used so far (getrusage(2)). Other
// load on the machine doesn't change it.
func cpuTime() (time.Duration, error) {
	var usage syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), err
}

// Bounded fails the test if work uses more processor time than maxCost allows. It returns
// the cost as a multiple of the cost of an ordinary document. Nothing may run in parallel.
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
	if times > maxCost {
		t.Errorf("took %s of processor time: %.0f times the time for an ordinary document (%s); the limit is %d times", after-before, times, unit, maxCost)
	}
	return times
}

// Filled repeats a unit between a head and a tail, up to the largest allowed size.
func Filled(head, unit, tail string) string {
	return head + strings.Repeat(unit, (tree.MaxSize-len(head)-len(tail))/len(unit)) + tail
}

// Many returns a document of almost the largest allowed size, with lines that line makes.
func Many(line func(int) string) string {
	var b strings.Builder
	for i := 0; b.Len() < tree.MaxSize-100; i++ {
		b.WriteString(line(i))
	}
	return b.String()
}

// Deep returns a document with the given number of levels.
func Deep(levels int) string {
	var b strings.Builder
	for i := range levels {
		b.WriteString(strings.Repeat("  ", i) + "a:\n")
	}
	return b.String()
}

// Aliases returns a list of nine aliases that expand to nine entries each, on twenty levels
// ("billion laughs"). The last alias is a20.
func Aliases() string {
	var b strings.Builder
	b.WriteString("a0: &a0 [x, x, x, x, x, x, x, x, x]\n")
	for i := range 20 {
		fmt.Fprintf(&b, "a%d: &a%d [%s*a%d]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d, ", i), 8), i)
	}
	return b.String()
}
