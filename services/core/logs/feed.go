package logs

import "time"

// Facility is the kind of source that a record is from.
type Facility string

const (
	FacilityService Facility = "service" // a log of Logs
	FacilityKernel  Facility = "kernel"
	FacilityAudit   Facility = "audit"
)

const (
	// Bounds of the feed: what the node says in some minutes, or a busy API server's
	// audit log in one.
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
// them to other machines. Before there is a reader it holds the lines since boot: one may come
// with the configuration.
type Feed struct {
	buffer[Record] // its mu guards off; locked after a ring's
	off            bool
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

// Read begins with the oldest record that is there.
func (f *Feed) Read() Reader[Record] { return f.read(0) }
