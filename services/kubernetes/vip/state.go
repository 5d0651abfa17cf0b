package vip

import (
	"bytes"
	"fmt"
	"net"
	"time"

	"github.com/garboard-os/garboard/services/system/neighbor"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// failedAfter is the number of failed checks in a row after which an API
	// server counts as failed: one or two may fail on a busy machine.
	failedAfter = 3
	// staleAfter is the age at which the last view of etcd is stale: one query may fail.
	// Another holder may have been elected soon after.
	staleAfter = 2500 * time.Millisecond
	// aloneAfter is the time without any frame from the link after which this node counts
	// as cut off, while it sends probes that routers and other control planes answer.
	aloneAfter = 5 * time.Second

	// probeTime is how long this node probes for another holder before it takes the
	// address, and probeEvery is how often. RFC 5227 has seconds, for machines without
	// another source; here, this node is already elected in etcd.
	probeTime  = 300 * time.Millisecond
	probeEvery = 100 * time.Millisecond
	// holderProbeEvery is how often a holder probes for another one, while it has a reason.
	holderProbeEvery = time.Second
	// conflictMemory is how long a conflict lasts after the last frame of the other
	// machine.
	conflictMemory = 5 * time.Second
	// tieAfter is how long two holders whose views are both stale keep the address.
	tieAfter = 3 * time.Second
	// foreignPause is the pause before the next attempt to take the address, after a
	// machine that isn't one of the control planes has answered for it.
	foreignPause = 10 * time.Second

	// holderCheckEvery is how often the next in the queue probes the holder's machine. Its
	// kernel answers, so a busy machine does, too. After unansweredGone probes in a row
	// without an answer it is gone: after one and a half seconds. A holder that has never
	// answered may not have taken the address yet: unansweredNew.
	holderCheckEvery = 250 * time.Millisecond
	unansweredGone   = 5
	unansweredNew    = 20
	// missedKeepalivesGone is the number of probes in a row without a keepalive after which
	// a machine whose kernel answers counts as frozen. Four seconds are about the time after
	// which the lease of a frozen holder ends; but if etcd's leader was frozen with it, the
	// next leader starts all leases anew.
	missedKeepalivesGone = 16
	// missedKeepalivesAfter is how many of those probes must come after a time without etcd:
	// a holder without etcd sends no keepalives.
	missedKeepalivesAfter = 2

	// The least time between two announcements: after a probe of another node (whose view
	// is stale, or which is about to take the address), after frames of another holder, and
	// in any case, for machines that lost or never got the others.
	answerEvery  = 200 * time.Millisecond
	defendEvery  = time.Second
	refreshEvery = 30 * time.Second

	// frameEvery is the least time between two steps because of frames: each step takes a
	// few system calls, and any machine may send thousands of frames.
	frameEvery = 10 * time.Millisecond
	// restEvery is how often facts are polled that aren't reported.
	restEvery = time.Second
)

// burst are the times at which the address is announced, since it was taken: frames
// get lost, and a switch drops frames for a short time after a port came up.
var burst = []time.Duration{0, 100 * time.Millisecond, 300 * time.Millisecond, time.Second, 3 * time.Second}

// conflict is another machine that has the address, or announces that it has.
type conflict struct {
	mac       net.HardwareAddr
	name      string // of the control plane that it is; "": a foreign machine
	first     time.Time
	last      time.Time
	announced time.Time // when it last announced that by itself
}

// state decides whether this node holds the address. Its inputs are facts, its
// outputs are orders; it has neither a clock nor a network connection.
//
//	          API server ready        first in etcd's queue    no answer for 300 ms
//	idle ──────────────────▶ candidate ─────────────▶ probing ─────────────────────▶ holder
//	 ▲                           ▲                      │ a foreign machine answers       │
//	 │                           └───── pause ◀─────────┘                                 │
//	 └── another node is elected · API server failed, other candidates · view stale and ──┘
//	     another node announces that it is the holder, or no frames from the link
//
// A holder's view is stale while etcd doesn't answer. The node then keeps the address, as
// long as its API server is healthy apart from etcd, and probes each second for another
// holder: a node that was elected meanwhile announces itself at once, and no other node
// does. So the last holder in a cluster without quorum stays, and a holder that was
// frozen or cut off leaves as soon as the first such frame arrives.
//
// The next in the queue probes the holder's machine four times a second. The kernel there
// answers, and a holder whose view isn't stale also sends keepalives. When the machine is
// gone, or only its kernel still answers, the next in the queue evicts the holder in etcd,
// and doesn't wait for the end of its lease.
//
// An answer of another control plane while this node probes doesn't prevent it from
// taking the address: that node isn't the holder in etcd any more, and its kernel answers
// although the rest of it may be frozen. An answer of a foreign machine does, and its MAC
// address is reported.
type state struct {
	mac net.HardwareAddr // of the link

	view        view
	ready       health    // of the API server, etcd and all
	alive       health    // of the API server, without etcd
	receivedAt  time.Time // when the link last received a frame
	staleSince  time.Time // since when the view is stale, and this node probes; zero: it isn't
	frames      uint64    // that the link has received
	conflict    *conflict
	probeSeen   bool             // another machine has probed for the address
	keepaliveTo net.HardwareAddr // the control plane that has probed this node alone; nil: none

	watched          clientv3.LeaseID // of the holder that is checked
	holderChecked    time.Time
	unanswered       int  // probes in a row
	answered         bool // a probe was
	missedKeepalives int  // probes in a row that only the kernel answered
	sendsKeepalives  bool // the holder has sent one

	hold      bool
	candidate bool // in etcd's queue, or on the way there
	cutOff    bool // gave it up only because no frames came from the link
	changed   time.Time
	why       string
	probing   time.Time // since when; zero: it doesn't probe
	probed    time.Time
	probes    int       // sent since probing
	pause     time.Time // until when
	foreign   string    // MAC address of the machine that has the address; "": none
	defended  time.Time
	bursts    int // of those above that were sent
}

// orders are the result of decide.
type orders struct {
	hold        bool
	candidate   bool
	announce    bool
	probe       bool // send probes for the address, and for other machines if stale
	stale       bool
	checkHolder bool             // probe the holder's machine
	evict       string           // why the holder is to be evicted; "": it isn't
	keepalive   net.HardwareAddr // to which machine a keepalive is sent; nil: none
	alone       bool             // check the API server without etcd
	again       time.Duration    // until the next step, if nothing happens before
}

// health is the outcome of checks.
type health struct {
	known  bool // one has succeeded
	failed int  // since the last that has
}

func (h *health) note(ok bool) {
	if ok {
		*h = health{known: true}
	} else {
		h.failed++
	}
}

func (h health) good() bool { return h.known && h.failed < failedAfter }

// checked records the outcome of a check of the API server; alone: without etcd.
func (s *state) checked(alone, ok bool) {
	if alone || ok {
		s.alive.note(ok)
	}
	if !alone || !ok {
		s.ready.note(ok)
	}
}

// counted records the number of frames that the link has received.
func (s *state) counted(now time.Time, frames uint64) {
	if frames != s.frames {
		s.frames, s.receivedAt = frames, now
	}
}

// observe records a frame of another machine.
func (s *state) observe(now time.Time, h neighbor.Observed) {
	switch h.What {
	case neighbor.Probe:
		s.probeSeen = true
		return
	case neighbor.DirectProbe:
		if _, peer := s.view.nodeByMAC(h.MAC); peer {
			s.keepaliveTo = h.MAC
		}
		return
	}
	if s.view.holder.MAC == h.MAC.String() {
		s.unanswered, s.answered = 0, true
		if h.What == neighbor.Keepalive {
			s.missedKeepalives, s.sendsKeepalives = 0, true
		}
	}
	r := s.conflict
	if r == nil || !bytes.Equal(r.mac, h.MAC) || now.Sub(r.last) > conflictMemory {
		r = &conflict{mac: h.MAC, first: now}
		s.conflict = r
	}
	r.name, _ = s.view.nodeByMAC(h.MAC)
	r.last = now
	if h.What == neighbor.Announcement || h.What == neighbor.Keepalive {
		r.announced = now
	}
}

// present returns the conflict if its machine has sent a frame since.
func (s *state) present(now, since time.Time) *conflict {
	if s.conflict == nil || s.conflict.last.Before(since) || now.Sub(s.conflict.last) > conflictMemory {
		return nil
	}
	return s.conflict
}

// stale reports whether the last view of etcd is too old.
func (s *state) stale(now time.Time) bool { return now.Sub(s.view.askedAt) > staleAfter }

func (s *state) set(now time.Time, hold bool, why string) {
	if s.hold != hold {
		s.changed = now
		s.bursts, s.defended = 0, time.Time{}
	}
	s.hold, s.why = hold, why
}

// decide returns what to do now.
func (s *state) decide(now time.Time) orders {
	switch {
	case !s.stale(now):
		s.cutOff, s.staleSince = false, time.Time{}
	case s.staleSince.IsZero():
		s.staleSince = now
	}
	if s.hold {
		s.keep(now)
	} else {
		s.seek(now)
	}
	// A short time without a leader of etcd, during an election, is no reason to
	// leave the queue.
	healthy := s.ready.good() || s.candidate && s.alive.good()
	s.candidate = s.hold || healthy && !now.Before(s.pause)
	o := orders{hold: s.hold, candidate: s.candidate, stale: s.stale(now), alone: s.candidate || s.cutOff, again: restEvery}
	if s.hold {
		s.holder(now, &o)
	}
	s.keepaliveTo = nil
	s.checkHolder(now, &o)
	interval := holderProbeEvery
	if !s.probing.IsZero() {
		interval = probeEvery
	}
	due := !s.probing.IsZero() || s.cutOff || s.hold && (o.stale || s.present(now, s.changed) != nil)
	if due && now.Sub(s.probed) >= interval {
		s.probed, o.probe = now, true
		s.probes++
	}
	if !s.probing.IsZero() { // other events may make the next step earlier, not later
		o.again = min(o.again, max(probeEvery-now.Sub(s.probed), time.Millisecond))
	}
	return o
}

// checkHolder is for the next in the queue: it decides when to probe the holder's
// machine, and when to evict the holder.
func (s *state) checkHolder(now time.Time, o *orders) {
	if s.hold || !o.candidate || !s.view.held || !s.view.next {
		s.watched = 0
		return
	}
	if s.watched != s.view.lease {
		s.watched, s.unanswered, s.answered = s.view.lease, 0, false
		s.missedKeepalives, s.sendsKeepalives = 0, false
	}
	o.again = min(o.again, holderCheckEvery)
	if now.Sub(s.holderChecked) < holderCheckEvery {
		return
	}
	most := unansweredNew
	if s.answered {
		most = unansweredGone
	}
	o.checkHolder = true
	switch {
	case o.stale: // as when the holder's member led etcd, until another one leads
		// A holder whose view is stale, too, sends no keepalives.
		s.missedKeepalives = min(s.missedKeepalives, missedKeepalivesGone-missedKeepalivesAfter)
	case s.unanswered >= most:
		o.evict = "doesn't answer"
	case s.sendsKeepalives && s.missedKeepalives >= missedKeepalivesGone:
		o.evict = "is frozen: only its kernel answers"
	}
	s.holderChecked = now
	s.unanswered++
	s.missedKeepalives++
}

// keep is for a holder: it decides whether to keep the address or give it up.
func (s *state) keep(now time.Time) {
	alive, r := s.alive.good(), s.present(now, s.view.askedAt)
	switch {
	case !s.stale(now) && s.view.held && !s.view.mine:
		s.set(now, false, fmt.Sprintf("%s holds it, by etcd's election", s.view.holder.Name))
	case !s.stale(now) && !alive && s.view.others > 0:
		s.set(now, false, "the API server of this node doesn't answer, and another one's does")
	case s.stale(now) && r != nil && r.name != "" && r.announced.After(s.view.askedAt):
		s.set(now, false, fmt.Sprintf("%s announces that it holds it, and etcd doesn't answer here", r.name))
	case s.stale(now) && r != nil && r.name != "" && now.Sub(r.first) > tieAfter && bytes.Compare(r.mac, s.mac) < 0:
		s.set(now, false, fmt.Sprintf("%s has it as well, and etcd doesn't answer here", r.name))
	case s.stale(now) && now.Sub(s.receivedAt) > aloneAfter && now.Sub(s.staleSince) > aloneAfter:
		s.cutOff = true
		s.set(now, false, "this node is cut off: no frames come from the link, and etcd doesn't answer here")
	case !alive && !s.stale(now):
		s.set(now, true, "the API server of this node doesn't answer, and no other one could take it")
	case !alive:
		s.set(now, true, "neither etcd nor the API server of this node answers: no other node is known that could take it")
	case s.stale(now):
		s.set(now, true, "etcd doesn't answer; the API server of this node is healthy but for that")
	case s.view.mine:
		s.set(now, true, "elected in etcd")
	default:
		s.set(now, true, "no other node is elected in etcd")
	}
}

// seek is for a node without the address: it probes, and takes the address if it may.
func (s *state) seek(now time.Time) {
	elected := !s.stale(now) && s.view.mine && s.candidate && s.alive.good() && !now.Before(s.pause)
	back := s.cutOff && s.alive.good() && now.Sub(s.receivedAt) <= restEvery
	if !elected && !back {
		s.probing = time.Time{}
		s.idle(now)
		return
	}
	if s.probing.IsZero() {
		s.probing, s.probed, s.probes = now, time.Time{}, 0
	}
	r := s.present(now, s.probing)
	switch {
	case r != nil && r.name == "":
		s.foreign = r.mac.String()
		s.probing, s.pause = time.Time{}, now.Add(foreignPause)
		s.set(now, false, fmt.Sprintf("a machine that is no control plane has it: %s", r.mac))
	case r != nil && !elected:
		s.probing, s.cutOff = time.Time{}, false
		s.set(now, false, fmt.Sprintf("%s holds it", r.name))
	// The number of probes counts, not only the time: a process that was frozen after its
	// first probe has received no answers.
	case now.Sub(s.probing) >= probeTime && s.probes >= int(probeTime/probeEvery) && now.Sub(s.probed) >= probeEvery:
		s.probing, s.foreign = time.Time{}, ""
		why := "elected in etcd"
		if !elected {
			why = "the link is back, and no other machine has it"
		}
		s.set(now, true, why)
	}
}

// idle sets the reason why this node doesn't have the address.
func (s *state) idle(now time.Time) {
	switch {
	case now.Before(s.pause) || s.cutOff:
		// The reason stays the one for which the address was given up.
	case s.stale(now):
		s.set(now, false, "etcd doesn't answer")
	case s.view.held && !s.view.mine:
		s.set(now, false, fmt.Sprintf("%s holds it", s.view.holder.Name))
	case !s.candidate:
		s.set(now, false, "the API server of this node isn't ready")
	default:
		s.set(now, false, "waiting for the election in etcd")
	}
}

// holder decides what a holder sends: nothing while its view is stale, because another
// node may have been elected.
func (s *state) holder(now time.Time, o *orders) {
	asked := s.probeSeen
	s.probeSeen = false
	if o.stale {
		s.defended = time.Time{} // announce it when the view isn't stale any more
		return
	}
	o.keepalive = s.keepaliveTo
	r := s.present(now, s.changed)
	s.foreign = ""
	if r != nil && r.name == "" {
		s.foreign = r.mac.String()
	}
	held, pause := now.Sub(s.changed), now.Sub(s.defended)
	switch {
	case s.bursts < len(burst):
		if o.announce = held >= burst[s.bursts]; o.announce {
			s.bursts++
		}
		if s.bursts < len(burst) {
			o.again = min(o.again, max(burst[s.bursts]-held, time.Millisecond))
		}
	case asked && pause >= answerEvery, r != nil && pause >= defendEvery, pause >= refreshEvery:
		o.announce = true
	}
	if o.announce {
		s.defended = now
	}
}
