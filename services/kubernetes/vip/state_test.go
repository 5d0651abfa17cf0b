package vip

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/services/system/neighbor"
	clientv3 "go.etcd.io/etcd/client/v3"
)

var (
	shared4    = netip.MustParseAddr("10.5.0.254")
	shared6    = netip.MustParseAddr("fd00::5:fe")
	ownMAC     = net.HardwareAddr{2, 0, 0, 0, 0, 5}
	peerMAC    = net.HardwareAddr{2, 0, 0, 0, 0, 6}
	foreignMAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}
)

// world is one node, with its own clock: each second etcd returns a view, the
// API server answers and the link receives a frame, unless that is switched off.
type world struct {
	t   *testing.T
	now time.Time
	s   state

	etcd, apiserver, link bool
	holder                string // by etcd's view; "self" is this node
	next, replies         bool   // this node is next; the holder's machine answers probes
	sendsKeepalives       bool   // not only the kernel's answers
	lease                 clientv3.LeaseID
	holderChecks, evicted int
	others                int
	frames                uint64
	last                  orders
	announced, probed     int
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, now: time.Unix(1_000_000, 0), etcd: true, apiserver: true, link: true, holder: "self", others: 2}
	w.s.mac, w.lease = ownMAC, 1
	return w
}

// pass lets time pass, in steps of 100 ms.
func (w *world) pass(d time.Duration) orders {
	w.t.Helper()
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(100 * time.Millisecond)
		w.step(w.now.UnixMilli()%1000 == 0)
	}
	return w.last
}

func (w *world) step(full bool) {
	if full {
		if w.etcd {
			w.s.view = view{
				askedAt: w.now, held: w.holder != "", mine: w.holder == "self", holder: node{Name: w.holder, MAC: peerMAC.String()}, others: w.others,
				next: w.next, lease: w.lease,
				nodes: []node{{Name: "self", MAC: ownMAC.String()}, {Name: "peer", MAC: peerMAC.String()}},
			}
		}
		w.s.checked(w.last.alone, w.apiserver && (w.etcd || w.last.alone))
	}
	if w.link {
		w.frames++
	}
	w.s.counted(w.now, w.frames)
	w.last = w.s.decide(w.now)
	if w.last.announce {
		w.announced++
	}
	if w.last.probe {
		w.probed++
	}
	if w.last.evict != "" {
		w.evicted++
	}
	if w.last.checkHolder {
		w.holderChecks++
		if w.replies {
			w.s.observe(w.now, neighbor.Observed{What: neighbor.Reply, MAC: peerMAC})
		}
		if w.sendsKeepalives {
			w.s.observe(w.now, neighbor.Observed{What: neighbor.Keepalive, MAC: peerMAC})
		}
	}
}

// observe reports a frame of another machine, and lets this node act on it at once.
func (w *world) observe(what neighbor.Observation, mac net.HardwareAddr) orders {
	w.s.observe(w.now, neighbor.Observed{What: what, MAC: mac})
	w.step(false)
	return w.last
}

func (w *world) want(hold bool, why string) {
	w.t.Helper()
	if w.last.hold != hold || !strings.Contains(w.s.why, why) {
		w.t.Fatalf("hold is %v because %q; want %v because %q", w.last.hold, w.s.why, hold, why)
	}
}

// holding is a world in which this node has the address.
func holding(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.pass(2 * time.Second)
	w.want(true, "elected")
	return w
}

func TestTheElectedOneTakesIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.holder = "peer"
	if o := w.pass(10 * time.Second); !o.candidate {
		t.Error("a node with an API server isn't a candidate")
	}
	w.want(false, "peer holds it")
	if w.probed+w.announced > 0 {
		t.Errorf("one that isn't elected asked %d times and announced %d times", w.probed, w.announced)
	}
	w.holder = "self"
	w.pass(time.Second)
	w.want(false, "") // it probes first
	w.pass(probeTime)
	w.want(true, "elected")
	if w.probed != 3 {
		t.Errorf("it asked %d times whether anybody has it, want 3", w.probed)
	}
	w.pass(4 * time.Second)
	if w.announced != len(burst) {
		t.Errorf("it announced itself %d times, want %d", w.announced, len(burst))
	}
	w.pass(time.Minute)
	if more := w.announced - len(burst); more != 2 {
		t.Errorf("in the minute after it announced itself %d times, want 2", more)
	}
}

func TestNoAPIServerNoCandidate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.apiserver = false
	if o := w.pass(10 * time.Second); o.candidate {
		t.Error("a node without an API server is a candidate")
	}
	w.want(false, "")
}

func TestAFailedAPIServerMovesIt(t *testing.T) {
	t.Parallel()
	w := holding(t)
	w.apiserver = false
	w.pass(2 * time.Second)
	w.want(true, "elected")
	w.pass(3 * time.Second)
	w.want(false, "isn't ready")
	if w.last.candidate {
		t.Error("it is still a candidate")
	}

	alone := holding(t)
	alone.apiserver, alone.others = false, 0
	alone.pass(time.Minute)
	alone.want(true, "no other one could")
	alone.others = 1
	alone.pass(2 * time.Second)
	alone.want(false, "")
}

// Duty 6: the last holder keeps it.
func TestWithoutQuorumTheHolderKeepsIt(t *testing.T) {
	t.Parallel()
	w := holding(t)
	w.pass(5 * time.Second)
	w.etcd = false
	w.announced = 0
	w.pass(time.Hour)
	w.want(true, "etcd doesn't answer")
	if w.announced > 0 {
		t.Errorf("with a stale view it announced itself %d times", w.announced)
	}
	w.apiserver = false
	w.pass(time.Minute)
	w.want(true, "no other node is known")
	w.etcd, w.apiserver = true, true
	w.pass(2 * time.Second)
	w.want(true, "elected")
	if w.announced == 0 {
		t.Error("it didn't announce itself once etcd agreed again")
	}
}

// The negative twin: without a quorum, a node that didn't have the address doesn't take it.
func TestWithoutQuorumItIsNotTaken(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.holder = "peer"
	w.pass(5 * time.Second)
	w.etcd = false
	w.pass(time.Hour)
	w.want(false, "")
}

func TestEtcdTookItAway(t *testing.T) {
	t.Parallel()
	w := holding(t)
	w.holder = "peer"
	w.pass(time.Second)
	w.want(false, "peer holds it")
}

// A node that was frozen doesn't notice that. A node that was elected meanwhile
// announces itself after a probe.
func TestThawed(t *testing.T) {
	t.Parallel()
	w := holding(t)
	w.now = w.now.Add(time.Minute)
	w.etcd = false // its own member needs some time to be back
	w.probed = 0
	w.step(false)
	w.want(true, "etcd")
	if w.probed != 1 {
		t.Fatal("it didn't ask at once who has it")
	}
	w.observe(neighbor.Reply, peerMAC) // an answer of the kernel alone means nothing
	w.want(true, "")
	w.observe(neighbor.Announcement, peerMAC)
	w.want(false, "peer announces")
	w.pass(time.Minute)
	w.want(false, "")

	// The other side: a holder whose view isn't stale announces itself when it is probed.
	other := holding(t)
	other.pass(5 * time.Second)
	other.announced = 0
	other.observe(neighbor.Probe, peerMAC)
	if other.announced != 1 {
		t.Errorf("asked, it announced itself %d times, want once", other.announced)
	}
	other.want(true, "elected")
}

// A frozen node's kernel still answers, so the new holder has to announce the
// address repeatedly.
func TestAFrozenOnesAnswersDontMatter(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.holder = "peer"
	w.pass(5 * time.Second)
	w.holder = "self"
	for range 13 {
		w.pass(100 * time.Millisecond)
		w.observe(neighbor.Reply, peerMAC)
	}
	w.want(true, "elected")
	w.pass(4 * time.Second)
	w.announced = 0
	for range 10 {
		w.observe(neighbor.Reply, peerMAC)
		w.pass(time.Second)
	}
	if w.announced < 9 {
		t.Errorf("beside a frozen one it announced itself %d times in 10 s", w.announced)
	}
	w.pass(conflictMemory + 2*time.Second)
	w.announced = 0
	w.pass(10 * time.Second)
	if w.announced > 1 {
		t.Errorf("long after the other's last frame it still announced itself %d times", w.announced)
	}
}

// A node that receives no frames is cut off: other nodes, if there are any,
// have the address. It takes it again if no machine has it.
func TestCutOff(t *testing.T) {
	t.Parallel()
	w := holding(t)
	w.etcd, w.link = false, false
	w.pass(staleAfter + aloneAfter - time.Second)
	w.want(true, "")
	w.pass(3 * time.Second)
	w.want(false, "cut off")
	w.pass(time.Minute)
	w.want(false, "cut off")
	w.link = true // the other two are down, and another machine sends frames
	w.pass(time.Second)
	w.want(true, "etcd doesn't answer")

	// A link may be quiet as long as nothing is probed.
	noFrames := holding(t)
	noFrames.link = false
	noFrames.pass(time.Hour)
	noFrames.etcd = false
	noFrames.pass(staleAfter + time.Second)
	noFrames.want(true, "etcd doesn't answer")

	healed := holding(t)
	healed.etcd, healed.link = false, false
	healed.pass(time.Minute)
	healed.want(false, "cut off")
	healed.link = true
	healed.pass(200 * time.Millisecond)
	healed.observe(neighbor.Reply, peerMAC)
	healed.want(false, "peer holds it")
	healed.pass(time.Minute)
	healed.want(false, "")
}

// Of two holders with stale views exactly one gives the address up.
func TestTwoStaleHolders(t *testing.T) {
	t.Parallel()
	for _, own := range []net.HardwareAddr{{2, 0, 0, 0, 0, 5}, {2, 0, 0, 0, 0, 7}} {
		w := holding(t)
		w.s.mac = own
		w.etcd = false
		w.pass(5 * time.Second)
		for range 10 {
			w.observe(neighbor.Reply, peerMAC)
			w.pass(time.Second)
		}
		if stays := own[5] < peerMAC[5]; w.last.hold != stays {
			t.Errorf("%s, beside %s: hold is %v", own, peerMAC, w.last.hold)
		}
	}
}

// The next in the queue notices when the holder's machine is gone, and only then.
func TestTheNextOneChecksTheHolder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.holder = "peer"
	w.next = true
	w.replies = true
	w.pass(time.Minute)
	if w.holderChecks < 150 || w.evicted > 0 {
		t.Fatalf("in a minute it asked %d times and evicted %d times", w.holderChecks, w.evicted)
	}
	w.replies = false
	w.pass(time.Second)
	if w.evicted > 0 {
		t.Error("it gave the holder a second only")
	}
	w.pass(time.Second)
	if w.evicted == 0 {
		t.Error("it didn't see that the holder is gone")
	}
	// The holder led etcd: it is evicted as soon as there is another leader.
	w.replies = true
	w.pass(5 * time.Second)
	w.replies, w.etcd = false, false
	w.pass(4 * time.Second)
	w.evicted, w.etcd = 0, true
	w.pass(1100 * time.Millisecond)
	if w.evicted == 0 {
		t.Error("with etcd's view, it has forgotten that the holder is gone")
	}
	// A new holder may not have taken the address yet.
	w.lease = 2
	w.pass(time.Second)
	w.evicted = 0
	w.pass(3 * time.Second)
	if w.evicted > 0 {
		t.Error("a new holder had no time")
	}
	w.pass(4 * time.Second)
	if w.evicted == 0 {
		t.Error("it waits for a new holder without an end")
	}

	// A node that isn't next, or isn't ready itself, does nothing.
	for name, change := range map[string]func(*world){
		"not next":  func(w *world) { w.next = false },
		"not ready": func(w *world) { w.apiserver = false },
	} {
		w := newWorld(t)
		w.holder, w.next = "peer", true
		w.pass(5 * time.Second)
		change(w)
		w.pass(4 * time.Second)
		w.holderChecks = 0
		w.pass(time.Minute)
		if w.holderChecks > 0 {
			t.Errorf("%s: it asked %d times", name, w.holderChecks)
		}
	}
}

// A holder of which only the kernel still answers is frozen, if it has sent keepalives
// before; a node of another release may send none.
func TestTheNextOneNoticesAFrozenHolder(t *testing.T) {
	t.Parallel()
	for _, led := range []bool{false, true} { // the holder's member led etcd
		w := newWorld(t)
		w.holder, w.next, w.replies, w.sendsKeepalives = "peer", true, true, true
		w.pass(time.Minute)
		w.sendsKeepalives, w.etcd = false, !led
		w.pass(3500 * time.Millisecond)
		if w.evicted > 0 {
			t.Errorf("led %v: the holder was given no time", led)
		}
		w.pass(500 * time.Millisecond)
		if led && w.evicted > 0 {
			t.Error("without etcd's view the holder is put out")
		}
		w.etcd = true
		w.pass(1500 * time.Millisecond)
		if w.evicted == 0 {
			t.Errorf("led %v: the holder's lease is waited for", led)
		}
		// The holder is back before etcd has evicted it.
		w.sendsKeepalives = true
		w.pass(time.Second)
		w.evicted = 0
		w.pass(time.Minute)
		if w.evicted > 0 {
			t.Errorf("led %v: it was back, and is put out", led)
		}
	}
	// While etcd answers no node, no node sends keepalives.
	silent := newWorld(t)
	silent.holder, silent.next, silent.replies, silent.sendsKeepalives = "peer", true, true, true
	silent.pass(time.Minute)
	silent.sendsKeepalives, silent.etcd = false, false
	silent.pass(time.Minute)
	silent.etcd = true
	silent.pass(500 * time.Millisecond)
	silent.sendsKeepalives = true
	silent.pass(time.Minute)
	if silent.evicted > 0 {
		t.Error("the holder is evicted for keepalives that it couldn't send while etcd was silent")
	}
	old := newWorld(t)
	old.holder, old.next, old.replies = "peer", true, true
	old.pass(time.Minute)
	old.observe(neighbor.Announcement, peerMAC)
	old.pass(time.Minute)
	if old.evicted > 0 {
		t.Error("one that has never sent keepalives counts as frozen")
	}
}

// A holder sends keepalives to the control planes that probe it, and only while its view
// isn't stale.
func TestTheHolderSendsKeepalives(t *testing.T) {
	t.Parallel()
	w := holding(t)
	if o := w.observe(neighbor.DirectProbe, peerMAC); o.keepalive.String() != peerMAC.String() {
		t.Errorf("it answers %q", o.keepalive)
	}
	if o := w.pass(time.Second); o.keepalive != nil {
		t.Errorf("it answers %q, which hasn't asked again", o.keepalive)
	}
	if o := w.observe(neighbor.DirectProbe, foreignMAC); o.keepalive != nil {
		t.Errorf("it answers %q, a foreign machine", o.keepalive)
	}
	w.etcd = false
	w.pass(staleAfter + time.Second)
	if o := w.observe(neighbor.DirectProbe, peerMAC); o.keepalive != nil || !o.hold {
		t.Errorf("with a stale view it answers %q", o.keepalive)
	}
	other := newWorld(t)
	other.holder = "peer"
	other.pass(5 * time.Second)
	if o := other.observe(neighbor.DirectProbe, peerMAC); o.keepalive != nil {
		t.Errorf("without the address it answers %q", o.keepalive)
	}
}

// A node that was frozen itself sent no probes meanwhile: missing answers don't count.
func TestAFrozenOneEvictsNoHolder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.holder, w.next, w.replies, w.sendsKeepalives = "peer", true, true, true
	w.pass(5 * time.Second)
	w.now = w.now.Add(time.Hour)
	w.pass(10 * time.Second)
	if w.evicted > 0 {
		t.Error("it had the holder put out of the queue")
	}
}
