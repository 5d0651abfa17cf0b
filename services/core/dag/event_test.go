package dag

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
)

func TestRingKeepsTheLastAndHeadTheFirst(t *testing.T) {
	g, err := New(Options{}, daemon("a"))
	if err != nil {
		t.Fatal(err)
	}
	const total = 3*ringSize + 7
	for i := range total {
		g.runners["a"].report(strconv.Itoa(i), change{})
	}
	events := g.Events()
	if len(events) != ringSize {
		t.Fatalf("%d events", len(events))
	}
	for i, e := range events {
		if want := total - ringSize + i; e.Message != strconv.Itoa(want) || e.Seq != uint64(want+1) {
			t.Fatalf("event %d is %+v", i, e)
		}
	}
	head := g.BootEvents()
	if len(head) != headSize || head[0].Seq != 1 || head[headSize-1].Seq != headSize {
		t.Errorf("%d first events", len(head))
	}
}

func TestASlowSubscriberLosesTheOldestAndBlocksNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Options{}, daemon("a"))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		slow, quick := g.Subscribe(ctx), g.Subscribe(ctx)
		const total = 5 * queueSize
		for i := range total {
			g.runners["a"].report("", change{})
			if e := <-quick; e.Seq != uint64(i+1) {
				t.Fatalf("event %d is %+v", i, e)
			}
		}
		cancel()
		synctest.Wait()
		var got []uint64
		for e := range slow {
			got = append(got, e.Seq)
		}
		if len(got) != queueSize || got[0] != total-queueSize+1 || got[queueSize-1] != total {
			t.Errorf("%d events from %d on", len(got), got[0])
		}
		g.runners["a"].report("nobody listens", change{})
	})
}

func TestMessagesAreBounded(t *testing.T) {
	g, err := New(Options{}, daemon("a"))
	if err != nil {
		t.Fatal(err)
	}
	g.runners["a"].report(strings.Repeat("ä€", messageSize), change{})
	s, _ := g.Status("a")
	if len(s.Message) > messageSize+len("…") || !utf8.ValidString(s.Message) {
		t.Errorf("%d bytes", len(s.Message))
	}
}

// Times are the kernel's: since its start, and never backwards.
func TestEventsCountFromTheKernelsStart(t *testing.T) {
	g, err := New(Options{}, daemon("a"))
	if err != nil {
		t.Fatal(err)
	}
	g.runners["a"].report("one", change{})
	g.runners["a"].report("two", change{})
	events := g.Events()
	if first, second := events[0].SinceBoot, events[1].SinceBoot; first <= 0 || second < first || second-first > time.Minute {
		t.Errorf("%s, %s", first, second)
	}
}
