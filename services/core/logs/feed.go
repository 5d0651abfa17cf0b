package logs

import (
	"context"
	"time"
)

// Facility is the kind of source that a record is from.
type Facility string

const (
	FacilityService Facility = "service" // a log of Logs
	FacilityKernel  Facility = "kernel"
	FacilityAudit   Facility = "audit"
)

const (
	// Bounds of the feed: what the node says in some minutes, or a busy API server's
	// audit log in one. Only a reader that falls behind needs them.
	feedLines = 8192
	feedBytes = 2 << 20
	// recordBytes is what a record needs besides its message.
	recordBytes = 96
)

// Record is a line of some log on its way to another machine.
type Record struct {
	Time     time.Time
	Facility Facility
	Service  string // whose line it is: the ID of the log
	Level    int    // as syslog(3) counts
	Message  string
}

func (r Record) size() int { return recordBytes + len(r.Message) }

// Feed is the lines of all logs in the order in which they came, for readers that send
// them to other machines. What all readers have is let go. Without a reader it holds the
// lines since boot: one may come with the configuration.
type Feed struct {
	buffer[Record] // its mu guards all below and the fields of its readers; locked after a ring's
	off            bool
	readers        map[*FeedReader]struct{}
}

// Keep turns the feed on or off. When it is off, it holds nothing.
func (f *Feed) Keep(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.off = !on; f.off {
		f.items, f.bytes = nil, 0
	}
}

// Add adds a record. It never waits: the oldest record gives way.
func (f *Feed) Add(r Record) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.off {
		f.add(r)
	}
}

// FeedReader reads the feed. One goroutine uses it.
type FeedReader struct {
	feed *Feed
	next uint64 // number of the record to read next
}

// Read begins with the oldest record that is there.
func (f *Feed) Read() *FeedReader {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.readers == nil {
		f.readers = map[*FeedReader]struct{}{}
	}
	r := &FeedReader{feed: f, next: f.oldest()}
	f.readers[r] = struct{}{}
	return r
}

// Close lets go of what only this reader hasn't read.
func (r *FeedReader) Close() {
	r.feed.mu.Lock()
	defer r.feed.mu.Unlock()
	delete(r.feed.readers, r)
	r.feed.trim()
}

// trim lets go of what all readers have.
func (f *Feed) trim() {
	if len(f.readers) == 0 {
		return
	}
	first := f.added
	for r := range f.readers {
		first = min(first, r.next)
	}
	for f.oldest() < first {
		f.shift()
	}
}

// Next returns the next records, of about most bytes, and how many before them were lost.
// It doesn't wait.
func (r *FeedReader) Next(most int) (records []Record, lost uint64) {
	f := r.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	all, lost := f.since(r.next)
	r.next += lost
	for _, record := range all {
		if most -= record.size(); most < 0 && len(records) > 0 {
			break
		}
		records = append(records, record)
	}
	r.next += uint64(len(records))
	f.trim()
	return records, lost
}

// Wait waits until Next has something, for stop, or for ctx.
func (r *FeedReader) Wait(ctx context.Context, stop <-chan struct{}) {
	_ = r.feed.await(ctx, stop, r.next) // the caller looks at ctx
}
