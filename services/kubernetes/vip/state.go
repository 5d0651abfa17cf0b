package vip

import (
	"bytes"
	"fmt"
	"net"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// sickAfter so many failed checks in a row, an API server is no use: one or two may
	// fail on a busy machine.
	sickAfter = 3
	// staleAfter is how old etcd's last view may be for it to count: one question may
	// fail. Another one may have been elected soon after.
	staleAfter = 2500 * time.Millisecond
	// aloneAfter is how long nothing at all may come from the link, while questions are
	// sent that routers and other control planes answer, for this node to be cut off.
	aloneAfter = 5 * time.Second

	// probeTime is how long is listened for another holder before the address is
	// taken, and probeEvery how often is asked. RFC 5227 has seconds, for machines that
	// have nobody else to ask; here, etcd has said that the address is ours.
	probeTime  = 300 * time.Millisecond
	probeEvery = 100 * time.Millisecond
	// lookEvery is how often a holder asks for another one, while it has reason to.
	lookEvery = time.Second
	// conflictMemory is how long after its last view another holder is taken to be there.
	conflictMemory = 5 * time.Second
	// tieAfter is how long two holders, of which etcd tells neither anything, stay both.
	tieAfter = 3 * time.Second
	// foreignPause is before the address is tried again after a machine that is none
	// of the control planes has answered for it.
	foreignPause = 10 * time.Second

	// lookAfterEvery is how often the next in the queue asks the holder's machine
	// whether it still has the address. Its kernel answers that, so a busy machine does,
	// too. So many questions in a row without an answer, and it is gone: after one and a
	// half seconds. One that has never answered may not have taken it yet.
	lookAfterEvery = 250 * time.Millisecond
	unansweredGone = 5
	unansweredNew  = 20
	// unconfirmedGone is how many of them in a row the kernel alone must have answered
	// for the rest of that machine to be frozen. Four seconds are about what a lease
	// leaves to a holder that gives no sign of life; but where etcd's leader was frozen
	// with it, the next leader begins all leases anew.
	unconfirmedGone = 16
	// unconfirmedAfter is how many of them must come after etcd was silent: until then it
	// had nothing to confirm with.
	unconfirmedAfter = 2

	// The least time between two announcements: that are due to one who asks (who is in
	// stale, or about to take the address), that are due to another holder, and that are
	// made in any case, for whoever has lost or never got the others.
	answerEvery  = 200 * time.Millisecond
	defendEvery  = time.Second
	refreshEvery = 30 * time.Second

	// frameEvery is how often frames are acted upon, at most: each time the kernel is
	// asked a few things, and anybody may send thousands.
	frameEvery = 10 * time.Millisecond
	// restEvery is how often facts are looked at that nobody reports.
	restEvery = time.Second
)

// burst are the times after the taking at which the address is announced: frames get
// lost, and a switch that has just brought a port up forwards nothing for a moment.
var burst = []time.Duration{0, 100 * time.Millisecond, 300 * time.Millisecond, time.Second, 3 * time.Second}

// conflict is a machine that has the address, or says so.
type conflict struct {
	mac       net.HardwareAddr
	name      string // of the control plane that it is; "": a foreign machine
	first     time.Time
	last      time.Time
	announced time.Time // when it last said so on its own
}

// state decides who holds the address, as far as this node is concerned. It is told
// facts, and says what to do; it has no clock and no network of its own.
//
//	          API server ready        first in etcd's queue       nobody answers for 300 ms
//	idle ──────────────────▶ candidate ─────────────▶ probing ─────────────────────▶ holder
//	 ▲                           ▲                      │ another machine answers            │
//	 │                           └───── pause ◀─────────┘                              │
//	 └── etcd says: another one · API server sick, another candidate · stale: ──────┘
//	     another one announces itself, or nobody is on the link at all
//
// A holder is stale while etcd doesn't answer it. It then keeps the address, as
// long as its API server is healthy but for etcd, and asks each second for another
// holder: one that etcd has elected meanwhile announces itself at once, and only such
// a one does. So the last holder in a cluster without quorum stays, and one that was
// frozen or cut off leaves within a frame's way after it is back.
//
// The next in the queue asks the holder's machine four times a second whether it still
// has the address. The kernel there answers, and a holder that isn't stale sends keepalives for
// itself. When the machine is gone, or only its kernel left, the next one has etcd put
// the holder out of the queue, and doesn't wait for the end of its lease.
//
// What answers while this node probes doesn't keep it from the address if it is one
// of the control planes: etcd has voted it out, and its kernel answers although
// nothing else on it does. A foreign machine does, and is named.
type state struct {
	mac net.HardwareAddr // of the link

	view       view
	ready      health    // of the API server, etcd and all
	alive      health    // of the API server, but for etcd
	receivedAt time.Time // when the link last brought anything
	staleSince time.Time // since when this node is stale, and asks who is there; zero: it isn't
	frames     uint64    // that the link has brought
	conflict   *conflict
	asked      bool             // somebody asks for the address
	checker    net.HardwareAddr // the control plane that asks whether this node is there; nil: none

	watched     clientv3.LeaseID // of the holder that is looked after
	lookedAt    time.Time
	unanswered  int  // questions
	answered    bool // one was
	unconfirmed int  // questions that the kernel alone answered
	confirms    bool // it does that

	hold      bool
	candidate bool // in etcd's queue, or on the way there
	away      bool // gave it up only because nobody was on the link
	changed   time.Time
	why       string
	probing   time.Time // since when; zero: it doesn't probe
	probed    time.Time
	probes    int       // while it probes, that many questions were asked
	pause     time.Time // until when
	foreign   string    // MAC address of the machine that has the address; "": none
	defended  time.Time
	bursts    int // of those above that were sent
}

// orders are what to do now.
type orders struct {
	hold      bool
	candidate bool
	announce  bool
	probe     bool // ask for the address, and for others on the link if stale
	stale     bool
	lookAfter bool             // ask the holder's machine whether it is there
	evict     string           // why its place in the queue is to be taken away; "": it isn't
	keepalive net.HardwareAddr // who is to be told that this node is there; nil: nobody
	alone     bool             // etcd needn't be well for the API server to count as healthy
	again     time.Duration    // until the next look, if nothing comes before
}

// health is what came of checks.
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

func (h health) good() bool { return h.known && h.failed < sickAfter }

// checked takes the outcome of a question to the API server; alone: but for etcd.
func (s *state) checked(alone, ok bool) {
	if alone || ok {
		s.alive.note(ok)
	}
	if !alone || !ok {
		s.ready.note(ok)
	}
}

// counted takes the number of frames that the link has brought.
func (s *state) counted(now time.Time, frames uint64) {
	if frames != s.frames {
		s.frames, s.receivedAt = frames, now
	}
}

// observe takes what another machine has said.
func (s *state) observe(now time.Time, h observed) {
	switch h.what {
	case asks:
		s.asked = true
		return
	case checks:
		if _, peer := s.view.knows(h.mac); peer {
			s.checker = h.mac
		}
		return
	}
	if s.view.holder.MAC == h.mac.String() {
		s.unanswered, s.answered = 0, true
		if h.what == confirms {
			s.unconfirmed, s.confirms = 0, true
		}
	}
	r := s.conflict
	if r == nil || !bytes.Equal(r.mac, h.mac) || now.Sub(r.last) > conflictMemory {
		r = &conflict{mac: h.mac, first: now}
		s.conflict = r
	}
	r.name, _ = s.view.knows(h.mac)
	r.last = now
	if h.what == announces || h.what == confirms {
		r.announced = now
	}
}

// present is the conflict, if it has said anything since.
func (s *state) present(now, since time.Time) *conflict {
	if s.conflict == nil || s.conflict.last.Before(since) || now.Sub(s.conflict.last) > conflictMemory {
		return nil
	}
	return s.conflict
}

// stale is that etcd hasn't said for too long who holds the address.
func (s *state) stale(now time.Time) bool { return now.Sub(s.view.asked) > staleAfter }

func (s *state) set(now time.Time, hold bool, why string) {
	if s.hold != hold {
		s.changed = now
		s.bursts, s.defended = 0, time.Time{}
	}
	s.hold, s.why = hold, why
}

// decide says what to do.
func (s *state) decide(now time.Time) orders {
	switch {
	case !s.stale(now):
		s.away, s.staleSince = false, time.Time{}
	case s.staleSince.IsZero():
		s.staleSince = now
	}
	if s.hold {
		s.keep(now)
	} else {
		s.seek(now)
	}
	// An etcd without a leader, for the moment that it takes to elect one, is no reason to
	// leave the queue.
	healthy := s.ready.good() || s.candidate && s.alive.good()
	s.candidate = s.hold || healthy && !now.Before(s.pause)
	o := orders{hold: s.hold, candidate: s.candidate, stale: s.stale(now), alone: s.candidate || s.away, again: restEvery}
	if s.hold {
		s.holder(now, &o)
	}
	s.checker = nil
	s.lookAfter(now, &o)
	interval := lookEvery
	if !s.probing.IsZero() {
		interval = probeEvery
	}
	looking := !s.probing.IsZero() || s.away || s.hold && (o.stale || s.present(now, s.changed) != nil)
	if looking && now.Sub(s.probed) >= interval {
		s.probed, o.probe = now, true
		s.probes++
	}
	if !s.probing.IsZero() { // what comes meanwhile makes it look sooner, and no later
		o.again = min(o.again, max(probeEvery-now.Sub(s.probed), time.Millisecond))
	}
	return o
}

// lookAfter is what the next in the queue does about the holder.
func (s *state) lookAfter(now time.Time, o *orders) {
	if s.hold || !o.candidate || !s.view.held || !s.view.next {
		s.watched = 0
		return
	}
	if s.watched != s.view.lease {
		s.watched, s.unanswered, s.answered = s.view.lease, 0, false
		s.unconfirmed, s.confirms = 0, false
	}
	o.again = min(o.again, lookAfterEvery)
	if now.Sub(s.lookedAt) < lookAfterEvery {
		return
	}
	most := unansweredNew
	if s.answered {
		most = unansweredGone
	}
	o.lookAfter = true
	switch {
	case o.stale: // where the holder's member led etcd, until another one does
		// Nor can a holder send keepalives that etcd doesn't answer either.
		s.unconfirmed = min(s.unconfirmed, unconfirmedGone-unconfirmedAfter)
	case s.unanswered >= most:
		o.evict = "doesn't answer"
	case s.confirms && s.unconfirmed >= unconfirmedGone:
		o.evict = "is frozen: only its kernel answers"
	}
	s.lookedAt = now
	s.unanswered++
	s.unconfirmed++
}

// keep gives the address up where it must be.
func (s *state) keep(now time.Time) {
	alive, r := s.alive.good(), s.present(now, s.view.asked)
	switch {
	case !s.stale(now) && s.view.held && !s.view.mine:
		s.set(now, false, fmt.Sprintf("etcd says that %s holds it", s.view.holder.Name))
	case !s.stale(now) && !alive && s.view.others > 0:
		s.set(now, false, "the API server of this node doesn't answer, and another one's does")
	case s.stale(now) && r != nil && r.name != "" && r.announced.After(s.view.asked):
		s.set(now, false, fmt.Sprintf("%s announces that it holds it, and etcd doesn't answer here", r.name))
	case s.stale(now) && r != nil && r.name != "" && now.Sub(r.first) > tieAfter && bytes.Compare(r.mac, s.mac) < 0:
		s.set(now, false, fmt.Sprintf("%s has it as well, and etcd doesn't answer here", r.name))
	case s.stale(now) && now.Sub(s.receivedAt) > aloneAfter && now.Sub(s.staleSince) > aloneAfter:
		s.away = true
		s.set(now, false, "this node is cut off: the link has brought nothing, and etcd doesn't answer here")
	case !alive && !s.stale(now):
		s.set(now, true, "the API server of this node doesn't answer, and no other one could take it")
	case !alive:
		s.set(now, true, "neither etcd nor the API server of this node answers: nobody is known who could take it")
	case s.stale(now):
		s.set(now, true, "etcd doesn't answer; the API server of this node is healthy but for that")
	case s.view.mine:
		s.set(now, true, "elected in etcd")
	default:
		s.set(now, true, "nobody else is elected in etcd")
	}
}

// seek takes the address where it may be.
func (s *state) seek(now time.Time) {
	elected := !s.stale(now) && s.view.mine && s.candidate && s.alive.good() && !now.Before(s.pause)
	back := s.away && s.alive.good() && now.Sub(s.receivedAt) <= restEvery
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
		s.probing, s.away = time.Time{}, false
		s.set(now, false, fmt.Sprintf("%s holds it", r.name))
	// A process that stood still between its first question and now has heard nothing,
	// whatever was said.
	case now.Sub(s.probing) >= probeTime && s.probes >= int(probeTime/probeEvery) && now.Sub(s.probed) >= probeEvery:
		s.probing, s.foreign = time.Time{}, ""
		why := "elected in etcd"
		if !elected {
			why = "the link is back, and nobody has it"
		}
		s.set(now, true, why)
	}
}

// idle says why a node without the address has none.
func (s *state) idle(now time.Time) {
	switch {
	case now.Before(s.pause) || s.away:
		// The reason is why it was given up.
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

// holder is what one that has the address says on the link: nothing while it is in
// stale, as then another's view may count more.
func (s *state) holder(now time.Time, o *orders) {
	asked := s.asked
	s.asked = false
	if o.stale {
		s.defended = time.Time{} // to be said once etcd agrees again
		return
	}
	o.keepalive = s.checker
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
