package etcd

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"pgregory.net/rapid"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// S-212, S-224: only a node of type init starts a cluster from nothing by
// itself; every control plane with data continues.
func TestS224WhoMayStartFromNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		machine config.MachineType
		journal phase
		data    string // a file in the data directory
		want    string // part of the wait, "" for none
		after   phase
	}{
		{"init, first boot", config.Init, none, "", "", fresh},
		{"init, cut short", config.Init, fresh, "", "", fresh},
		{"init, with data of before there was a journal", config.Init, none, "member", "", none},
		{"init, data lost", config.Init, member, "", "its data is gone", member},
		{"control plane, first boot", config.ControlPlane, none, "", "bootstrap, or for a control plane to join at https://127.0.0.1", none},
		{"control plane, bootstrapped", config.ControlPlane, fresh, "", "", fresh},
		{"control plane, with data", config.ControlPlane, member, "member", "", member},
		{"control plane, with data of before there was a journal", config.ControlPlane, none, "member", "", none},
		{"control plane, join cut short", config.ControlPlane, joining, "member/snap", "bootstrap, or for", joining},
		{"control plane, joining, nobody to ask", config.ControlPlane, joining, "member/wal/0.wal", "", joining},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			n := r.node("a", tt.machine, netip.MustParseAddr("192.0.2.1"))
			must(t, os.MkdirAll(n.path("data", tt.data), 0o700))
			must(t, n.write(record{Phase: tt.journal, Token: "t"}))
			err := n.decide(t.Context())
			var w *wait
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("error %v", err)
			case tt.want != "" && (!errors.As(err, &w) || !strings.Contains(w.what, tt.want) || (w.code == DataLost) != strings.Contains(tt.name, "data lost")):
				t.Errorf("error %v, want a wait for %q", err, tt.want)
			}
			if got, err := n.read(); err != nil || got.Phase != tt.after {
				t.Errorf("the journal says %q, %v; want %q", got.Phase, err, tt.after)
			}
		})
	}
}

// A continued wait is reported once, and ends with its context.
func TestS355WaitIsReportedOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.knows(0, netip.MustParseAddr("192.0.2.1")) // itself
	n := r.node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
	ctx, cancel := context.WithCancel(t.Context())
	reports, logged := 0, ""
	event := func(code reason.Code, _ string) {
		reports++
		if code != NoCluster {
			t.Errorf("reason %q", code)
		}
		n.begin <- struct{}{} // search again at once
		if reports == 1 {
			time.AfterFunc(joinRetry/10, cancel)
		}
	}
	log := func(_ reason.Code, m string) {
		if ctx.Err() == nil { // an attempt at that moment fails for another reason
			logged = m
		}
	}
	if err := n.prepare(ctx, event, log); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if reports != 1 || logged != errNoControlPlane.Error() {
		t.Errorf("reported %d times, logged %q", reports, logged)
	}
}

// The API servers in an EndpointSlice, without this node.
func TestS215Others(t *testing.T) {
	t.Parallel()
	me := self{"a", netip.MustParseAddr("10.5.0.2")}
	ports := []any{map[string]any{"name": "https", "port": 6443.0}}
	found := kubeclient.Object{"items": []any{
		map[string]any{"ports": ports, "endpoints": []any{
			map[string]any{"addresses": []any{"10.5.0.4", "10.5.0.2", "not an address", 7}},
			map[string]any{"addresses": []any{"10.5.0.3"}},
		}},
		map[string]any{"ports": ports, "endpoints": []any{map[string]any{"addresses": []any{"fd00::3", "10.5.0.3"}}, map[string]any{}}},
	}}
	want := []string{"https://10.5.0.3:2379", "https://10.5.0.4:2379", "https://[fd00::3]:2379"}
	if got := others(found, me); !slices.Equal(got, want) {
		t.Errorf("others %q, want %q", got, want)
	}
}

// The guard counts the remaining voting members, and lists them.
func TestQuorumGuard(t *testing.T) {
	t.Parallel()
	m := func(id uint64, name string) *pb.Member { return &pb.Member{ID: id, Name: name} }
	a, b, c, l := m(0xa, "one"), m(0xb, "two"), m(0xc, "three"), m(0xd, "late")
	l.IsLearner = true
	for _, tt := range []struct {
		name    string
		members []*pb.Member
		remove  *pb.Member
		well    string // IDs of members that answer
		want    error
		says    string
	}{
		{"one of three", []*pb.Member{a, b, c}, c, "abc", nil, ""},
		{"a dead one of three", []*pb.Member{a, b, c}, c, "ab", nil, ""},
		{"a living one of three, another is dead", []*pb.Member{a, b, c}, c, "ac", ErrQuorum, "of the 2 voting members that are left, 2 must answer, and 1 do (one (a)); no answer from two (b)"},
		{"one of two", []*pb.Member{a, b}, b, "ab", nil, ""},
		{"the living one of two", []*pb.Member{a, b}, b, "b", ErrQuorum, "1 must answer, and 0 do (none); no answer from one (a)"},
		{"the last one", []*pb.Member{a, l}, a, "ad", ErrLast, "one (a)"},
		{"a learner", []*pb.Member{a, l}, l, "", nil, ""},
	} {
		answers := map[uint64]bool{}
		for _, m := range tt.members {
			answers[m.ID] = strings.Contains(tt.well, HexID(m.ID))
		}
		err := mayRemove(tt.members, tt.remove, answers)
		if !errors.Is(err, tt.want) || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %v with %q", tt.name, err, tt.want, tt.says)
		}
	}
}

// The quorum counts members that are down: the only member may stop, but
// neither of two.
func TestQuorumGuardOfAStop(t *testing.T) {
	t.Parallel()
	m := func(id uint64, name string) *pb.Member { return &pb.Member{ID: id, Name: name} }
	a, b, c, l := m(0xa, "one"), m(0xb, "two"), m(0xc, "three"), m(0xd, "late")
	d, e := m(0xe, "four"), m(0xf, "five")
	l.IsLearner = true
	for _, tt := range []struct {
		name    string
		members []*pb.Member
		stop    *pb.Member
		well    string // IDs of members that answer
		says    string // "": it is allowed
	}{
		{"one of three", []*pb.Member{a, b, c}, c, "abc", ""},
		{"a dead one of three", []*pb.Member{a, b, c}, c, "ab", ""},
		{"a living one of three, another is dead", []*pb.Member{a, b, c}, c, "ac",
			"stop etcd member three (c): the cluster would lose its quorum: of its 3 voting members, 2 must answer, and without this one 1 do (one (a)); no answer from two (b)"},
		{"the last living one of three", []*pb.Member{a, b, c}, c, "c", "without this one 0 do (none); no answer from one (a), two (b)"},
		{"one of two", []*pb.Member{a, b}, b, "ab", "of its 2 voting members, 2 must answer, and without this one 1 do (one (a))"},
		{"one of three, of which one learns", []*pb.Member{a, b, l}, b, "abd", "of its 2 voting members, 2 must answer, and without this one 1 do (one (a))"},
		{"one of five, another is dead", []*pb.Member{a, b, c, d, e}, a, "abce", ""},
		{"one of five, two are dead", []*pb.Member{a, b, c, d, e}, a, "abc", "of its 5 voting members, 3 must answer, and without this one 2 do (two (b), three (c)); no answer from four (e), five (f)"},
		{"the only one", []*pb.Member{a}, a, "a", ""},
		{"the only one that votes", []*pb.Member{a, l}, a, "ad", ""},
		{"a learner", []*pb.Member{a, b, l}, l, "d", ""},
	} {
		answers := map[uint64]bool{}
		for _, m := range tt.members {
			answers[m.ID] = strings.Contains(tt.well, HexID(m.ID))
		}
		err := mayStop(tt.members, tt.stop, answers)
		if errors.Is(err, ErrQuorum) != (tt.says != "") || err != nil && (!errors.As(err, new(Refusal)) || !strings.HasSuffix(err.Error(), tt.says)) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.says)
		}
	}
}

// S-074: extra arguments win, and the order is fixed.
func TestS074Arguments(t *testing.T) {
	t.Parallel()
	args := arguments(self{"cp-1", netip.MustParseAddr("10.5.0.2")}, record{}, config.Args{"snapshot-count": {"5000"}, "auto-compaction-retention": {"1h"}})
	flag := func(arg string) string { name, _, _ := strings.Cut(arg, "="); return name }
	if args[0] != "etcd" || !slices.IsSortedFunc(args[1:], func(a, b string) int { return strings.Compare(flag(a), flag(b)) }) {
		t.Errorf("not in a fixed order: %q", args)
	}
	for _, want := range []string{
		"--name=cp-1", "--initial-cluster=cp-1=https://10.5.0.2:2380", "--snapshot-count=5000", "--auto-compaction-retention=1h",
		"--client-cert-auth=true", "--peer-client-cert-auth=true", "--listen-client-urls=https://127.0.0.1:2379,https://10.5.0.2:2379",
	} {
		if !slices.Contains(args, want) {
			t.Errorf("%s is missing in %q", want, args)
		}
	}
	if v6 := arguments(self{"a", netip.MustParseAddr("fd00::2")}, record{}, nil); !slices.Contains(v6, "--advertise-client-urls=https://[fd00::2]:2379") {
		t.Errorf("IPv6 address without brackets in %q", v6)
	}
	joins := arguments(self{"b", netip.MustParseAddr("10.5.0.3")}, record{Phase: joining, Initial: "a=https://10.5.0.2:2380,b=https://10.5.0.3:2380"}, nil)
	if !slices.Contains(joins, "--initial-cluster=a=https://10.5.0.2:2380,b=https://10.5.0.3:2380") || !slices.Contains(joins, "--initial-cluster-state=existing") {
		t.Errorf("a joining member begins with %q", joins)
	}
	if begins := arguments(self{}, record{Phase: fresh, Token: "t"}, nil); !slices.Contains(begins, "--initial-cluster-token=t") {
		t.Errorf("a new cluster begins with %q", begins)
	}
}

// logHead is the beginning of a log as etcd writes it, of member
// ec1314ea52838568 in cluster dfd396ec7b4c7b9e.
const logHead = "0400000000000084080410000000000020000000000000000801" +
	"10adffce85071a1608e88a8e94a59dc589ec01109ef7b1dac7dde5e9df010e00000000000082080510a686c9e60f1a0408001000"

// holds gives the node data with this beginning.
func (n *node) holds(t *testing.T) {
	t.Helper()
	data, err := hex.DecodeString(logHead)
	must(t, err)
	must(t, os.MkdirAll(n.path("data", "member", "wal"), 0o700))
	must(t, os.WriteFile(n.path("data", "member", "wal", "0.wal"), data, 0o600))
}

// The identity of the data comes from the beginning of a log; a shorter part isn't enough.
func TestS225Identity(t *testing.T) {
	t.Parallel()
	head, err := hex.DecodeString(logHead)
	must(t, err)
	if id, err := parseIdentity(head); err != nil || id != (identity{0xec1314ea52838568, 0xdfd396ec7b4c7b9e}) {
		t.Errorf("%x, %v", id, err)
	}
	for n := range 56 { // the end of the metadata
		if id, err := parseIdentity(head[:n]); err == nil {
			t.Errorf("the first %d bytes are of %x", n, id)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		_, _ = parseIdentity(rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "garbage"))
	})
}

// A log that only etcd can read, perhaps of another release, doesn't keep a
// cluster from getting up.
func TestUnknownLogSettles(t *testing.T) {
	t.Parallel()
	n := newRig(t).node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
	n.holds(t)
	must(t, os.WriteFile(n.path("data", "member", "wal", "0.wal"), []byte("a log of another kind"), 0o600))
	must(t, n.write(record{Phase: joining, Member: "1", Cluster: "2", Initial: "a=x"}))
	must(t, n.settle(t.Context(), *n.unsettled.Load()))
	if r, err := n.read(); err != nil || r.Phase != member || r.Member != "1" || r.Cluster != "2" || r.Initial != "" {
		t.Errorf("the journal says %+v, %v", r, err)
	}
}

// An unreadable journal is put aside: a member with data continues, and a node
// without data waits.
func TestUnreadableJournal(t *testing.T) {
	t.Parallel()
	for _, content := range []string{"", "{", "\x00\x00\x00", `{"phase": 7}`, `{"phase": "member"`} {
		for _, data := range []bool{true, false} {
			n := newRig(t).node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
			if data {
				n.holds(t)
			}
			must(t, os.WriteFile(n.o.Journal, []byte(content), 0o600))
			if err := n.decide(t.Context()); data && err != nil {
				t.Errorf("a member with the journal %q: %v", content, err)
			} else if !data {
				waits(t, err, "bootstrap, or for a control plane to join")
			}
			if kept, err := os.ReadFile(n.o.Journal + ".unreadable"); err != nil || string(kept) != content {
				t.Errorf("the journal %q is kept as %q, %v", content, kept, err)
			}
		}
	}
}

// S-225: the journal decides to which cluster the data belongs, or else the
// file beside the data. If neither has that, etcd decides.
func TestS225Foreign(t *testing.T) {
	t.Parallel()
	const cluster = "dfd396ec7b4c7b9e"
	for _, tt := range []struct {
		name      string
		journal   record
		owner     string // cluster
		authority string // "": this one's
		foreign   string // part of the error
	}{
		{"of before there was either", record{}, "", "", ""},
		{"STATE was lost", record{}, cluster, "", ""},
		{"an earlier installation's", record{}, cluster, "00", "its authority isn't that of cluster.etcd.ca"},
		{"what lies beside is of other data", record{}, "1", "00", ""},
		{"this installation's, and its authority was replaced", record{Phase: member, Cluster: cluster}, cluster, "00", ""},
		{"another disk was put in", record{Phase: member, Cluster: "2"}, "", "", "this node is a member of cluster 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newRig(t).node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
			n.holds(t)
			must(t, n.write(tt.journal))
			if tt.owner != "" {
				id, err := strconv.ParseUint(tt.owner, 16, 64)
				must(t, err)
				must(t, n.own(identity{cluster: id}))
				if tt.authority != "" {
					data, err := json.Marshal(owner{tt.owner, tt.authority})
					must(t, err)
					must(t, os.WriteFile(n.ownerFile(), data, 0o600))
				}
			}
			err := n.decide(t.Context())
			var w *wait
			switch {
			case tt.foreign == "" && err != nil:
				t.Errorf("error %v", err)
			case tt.foreign != "" && (!errors.As(err, &w) || w.code != ForeignData || !strings.Contains(w.what, tt.foreign) || !strings.Contains(w.what, cluster)):
				t.Errorf("error %v, want a wait about %q", err, tt.foreign)
			}
			if data, err := n.hasData(); !data || err != nil {
				t.Errorf("the data is gone: %v", err)
			}
		})
	}
}

// A member that isn't healthy asks the other members that it knows, even if the
// endpoint accepts requests and never answers.
func TestExaminedBehindASilentEndpoint(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.swallows()
	n := r.node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
	n.holds(t)
	peer, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { peer.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var asked atomic.Bool
	go func() {
		if conn, err := peer.Accept(); err == nil {
			asked.Store(true)
			cancel()
			conn.Close()
		}
	}()
	// Again, like the service: it takes two seconds of five until the endpoint is given up.
	eventually.That(t, 10*time.Second, "the peer to be asked", func() error {
		must(t, n.examine(ctx, record{Phase: member, Peers: []string{"https://" + peer.Addr().String()}}))
		if !asked.Load() {
			return errors.New("it wasn't")
		}
		return nil
	})
}

// After failed requests to the endpoint the node uses the remembered members,
// without itself. A member that was killed starts again at once, and one that
// ended by itself first asks for the reason.
func TestKilledIsNoReasonToAsk(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err  error
		want bool
	}{
		{fmt.Errorf("run: %w", &containerd.ExitError{ID: "etcd", Status: 137}), true},
		{&containerd.ExitError{ID: "etcd", Status: 1}, false},
		{&containerd.ExitError{ID: "etcd"}, false},
		{errRemoved, false},
		{nil, false},
	} {
		if got := killed(test.err); got != test.want {
			t.Errorf("%v: %t, want %t", test.err, got, test.want)
		}
	}
}

func TestRemembered(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	n := r.node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
	for id, from := range map[string]string{
		"192.0.2.1:6443": balancer.FromKubernetes, "192.0.2.2:6443": balancer.FromKubernetes, "192.0.2.9:6443": balancer.FromConfig, "example.org:6443": balancer.FromKubernetes,
	} {
		must(t, balancer.APIServers.Put(n.o.Store.As("test"), id, balancer.APIServer{From: from}))
	}
	me, err := n.o.self()
	must(t, err)
	if got := n.remembered(me); !slices.Equal(got, []string{"https://192.0.2.2:2379"}) {
		t.Errorf("got %v", got)
	}
}

// A search for a running cluster that is cancelled begins no cluster.
func TestCalledOffWhileItLooks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.knows(http.StatusOK, netip.MustParseAddr("192.0.2.9"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, kind := range []config.MachineType{config.Init, config.ControlPlane} {
		n := r.node(string(kind), kind, netip.MustParseAddr("192.0.2.1"))
		if err := n.alone(ctx, record{}, nil, lookTimeout, seen.begun); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", kind, err)
		}
		if err := n.decide(ctx); err == nil {
			t.Errorf("%s begins", kind)
		}
		if got, err := n.read(); err != nil || got.Phase != none {
			t.Errorf("%s: the journal says %q, %v", kind, got.Phase, err)
		}
	}
}
