package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// joinRetry is the pause between two searches for a cluster: a request of each waiting
	// node is no load for an idle API server.
	joinRetry = 2 * time.Second
	// promoteRetry is the pause before a change of members is requested again: a new member
	// of a small cluster has the data within a second.
	promoteRetry = 500 * time.Millisecond
	// initTimeout bounds how long a node of type init looks for a living cluster before
	// it begins one. If nothing listens at the endpoint yet, the connection fails at once;
	// if no machine has the address, the kernel waits three seconds for it. The API servers of
	// a cluster may be slow: who doesn't answer counts as absent then.
	initTimeout = 15 * time.Second
)

// The reasons of a member's wait in events, and Learner for the health check.
const (
	NoCluster    reason.Code = "NoCluster"    // to join
	DataLost     reason.Code = "DataLost"     // this node was a member, and no other one answers
	ForeignData  reason.Code = "ForeignData"  // a decision: the data belongs to another cluster
	OtherSecrets reason.Code = "OtherSecrets" // the configuration's secrets belong to another cluster
	Learner      reason.Code = "Learner"      // it doesn't vote before it has the data
)

// wait is an error that says what the member waits for; it isn't a failure.
type wait struct {
	what  string
	code  reason.Code // "": that of the cause, or NoCluster
	cause error       // why it isn't there yet
	seen  error       // only for the log: a cluster that isn't there yet fails in many ways
}

func (w *wait) Error() string {
	if w.cause == nil {
		return w.what
	}
	return w.what + ": " + w.cause.Error()
}

func (w *wait) Unwrap() error { return w.cause }

// Reason is for reason.Of.
func (w *wait) Reason() reason.Code { return cmp.Or(w.code, reason.Of(w.cause), NoCluster) }

// eventFunc reports an event of a service, or writes to its log.
type eventFunc func(code reason.Code, message string)

// onlyChanges drops messages that equal the one before.
func (t eventFunc) onlyChanges() eventFunc {
	var last string
	return func(code reason.Code, message string) {
		if message != last {
			last = message
			t(code, message)
		}
	}
}

// prepare returns after it is decided how the member begins; until then it
// reports what it waits for.
func (e *Etcd) prepare(ctx context.Context, event, log eventFunc) error {
	// etcd demands 0700.
	if err := errors.Join(untrusted.MkdirAll(e.o.DataDir, 0o700), untrusted.Chmod(e.o.DataDir, 0o700)); err != nil {
		return err
	}
	e.going.Store(false)
	if err := untilDecided(ctx, e.begin, event, log, func() error { return e.decide(ctx) }); err != nil {
		return cmp.Or(ctx.Err(), err)
	}
	// DIRECTORY/member/wal/FILE, also of a release in which etcd was root.
	return untrusted.Give(e.o.DataDir, boot.Owner(ID), 4)
}

// untilDecided repeats attempts that return a *wait, and reports each new one. hurry ends a pause.
func untilDecided(ctx context.Context, hurry <-chan struct{}, event, log eventFunc, try func() error) error {
	event, log = event.onlyChanges(), log.onlyChanges()
	for {
		err := try()
		w, waits := errors.AsType[*wait](err)
		if !waits {
			return err
		}
		event(w.Reason(), "Waiting for "+w.Error())
		if w.seen != nil {
			log("", w.seen.Error())
		}
		if !sleep.Until(ctx, hurry, joinRetry) {
			return err
		}
	}
}

// decide records in the journal how the member begins, or returns a *wait.
func (e *Etcd) decide(ctx context.Context) error {
	return e.inTurn(ctx, func() error {
		err := e.settleBeginning(ctx)
		e.going.Store(err == nil)
		return err
	})
}

// settleBeginning is called by the holder of turn.
func (e *Etcd) settleBeginning(ctx context.Context) error {
	r, err := e.readOrPutAside()
	if err == nil {
		err = e.Meet(r.Peers...)
	}
	if err != nil {
		return err
	}
	restoring, err := e.o.Running(RecoverOperation)
	if err == nil && restoring != "" && r.Phase != fresh {
		err = fmt.Errorf("gbctl operation attach %s", restoring)
	}
	if err != nil {
		return &wait{what: "the snapshot to be restored", cause: err}
	}
	leaving, err := e.o.Running(append([]string{LeaveOperation}, e.o.LeaveWith...)...)
	if err != nil {
		return &wait{what: "the operations of this node to be known", cause: err}
	}
	if restoring == "" {
		if err := e.tidy(); err != nil {
			return err
		}
	}
	cfg, err := configuration.Config(e.o.Store)
	data, unread := e.hasData()
	if err = cmp.Or(err, unread); err != nil {
		return err
	}
	switch {
	case leaving != "" && r.Phase != none:
		return e.waitToLeave(ctx, r, data, leaving)
	case data && r.Phase == joining:
		return e.resumeJoin(ctx, r)
	case data:
		return e.goOn(ctx, r)
	case r.Phase == fresh:
		e.keep(r)
		return nil
	case cfg.Machine.Type == config.Init && r.Phase == none:
		return e.beginByItself(ctx, r)
	}
	return e.join(ctx, r)
}

// goOn is for a member with data, unless the data is known to belong to no member.
func (e *Etcd) goOn(ctx context.Context, r record) error {
	if err := e.foreignData(r); err != nil {
		return err
	}
	if e.suspect.Load() && r.Phase != fresh {
		err := e.examine(ctx, r)
		if errors.Is(err, errRemoved) {
			return e.again(ctx, r)
		}
		if err != nil {
			return err
		}
	}
	e.keep(r)
	return nil
}

// beginByItself is for a node of type init at its first start: a
// reinstalled node finds its running cluster, and joins it.
func (e *Etcd) beginByItself(ctx context.Context, r record) error {
	err := e.beginAlone(ctx, r)
	if errors.As(err, new(Refusal)) {
		joined := e.join(ctx, r)
		if w, ok := errors.AsType[*wait](joined); ok {
			return &wait{what: fmt.Sprintf("%s (of type init, this node begins no second cluster: %v)", w.what, err), code: w.code, cause: w.cause, seen: w.seen}
		}
		return joined
	}
	return err
}

func (e *Etcd) beginAlone(ctx context.Context, r record) error {
	e.beginning.Add(1) // until the journal says so
	defer e.beginning.Add(-1)
	if err := e.alone(ctx, r, nil, initTimeout, seen.begun); err != nil {
		return err
	}
	return e.write(record{Phase: fresh, Token: newToken()})
}

// tidy removes the files of a recovery that isn't running.
func (e *Etcd) tidy() error {
	if !e.uploading.TryLock() {
		return nil
	}
	defer e.uploading.Unlock()
	return untrusted.RemoveAll(e.recoveryDir())
}

// resumeJoin examines the data of a join that was interrupted.
func (e *Etcd) resumeJoin(ctx context.Context, r record) error {
	if !e.hasLog() || e.isRemoved(ctx, r) {
		return e.again(ctx, r)
	}
	e.keep(r)
	return nil
}

// waitToLeave is for a member that an operation removes, after a restart. It runs unless
// the cluster reports that it isn't a member any more: the removal may need its vote.
func (e *Etcd) waitToLeave(ctx context.Context, r record, data bool, id string) error {
	if !data || !e.hasLog() || e.isRemoved(ctx, r) {
		return &wait{what: "this node to have left etcd", cause: fmt.Errorf("gbctl operation attach %s", id)}
	}
	return e.goOn(ctx, r)
}

// isRemoved reports whether the cluster says that this node isn't a member. Without an
// answer it counts as one: if the whole cluster was down, the others may be waiting for it.
func (e *Etcd) isRemoved(ctx context.Context, r record) bool {
	found, c, err := e.cluster(ctx, r)
	if err != nil {
		return false
	}
	defer c.Close()
	is := func(m *pb.Member) bool { return HexID(m.ID) == r.Member }
	return HexID(found.Header.ClusterId) != r.Cluster || !slices.ContainsFunc(found.Members, is)
}

// again begins from nothing. It removes only data of a member that never voted,
// or that isn't a member any more.
func (e *Etcd) again(ctx context.Context, r record) error {
	if err := e.clean(); err != nil {
		return err
	}
	return e.join(ctx, r)
}

// cluster finds the other members and asks them for the member list. The caller
// closes the client.
func (e *Etcd) cluster(ctx context.Context, r record) (*clientv3.MemberListResponse, *clientv3.Client, error) {
	me, err := e.o.self()
	if err != nil {
		return nil, nil, err
	}
	patience := lookTimeout
	if len(r.Peers) > 0 {
		patience = knownTimeout
	}
	urls, err := e.find(ctx, me, patience)
	if err != nil {
		if urls = r.Peers; len(urls) == 0 {
			urls = e.remembered(me)
		}
		if len(urls) == 0 {
			return nil, nil, e.waitForCluster(r, err)
		}
	}
	if r.Phase != joining {
		e.greet(ctx, urls)
	}
	c, err := Dial(ctx, e.o.Store, urls...)
	if err != nil {
		return nil, nil, err
	}
	found, err := list(ctx, c)
	if err != nil {
		c.Close()
		if why := e.foreignEtcd(ctx, urls); why != nil {
			return nil, nil, why
		}
		w := &wait{what: fmt.Sprintf("etcd at %s to answer", strings.Join(urls, ", ")), cause: err}
		if data, _ := e.hasData(); r.Phase == member && !data {
			e.addLoss(w)
		}
		return nil, nil, w
	}
	return found, c, nil
}

// waitForCluster is the wait of a node that finds no control plane of its cluster.
func (e *Etcd) waitForCluster(r record, seen error) error {
	if why := e.foreign(seen); why != nil {
		return why
	}
	cfg, err := configuration.Config(e.o.Store)
	if err != nil {
		return err
	}
	w := &wait{what: fmt.Sprintf("bootstrap, or for a control plane to join at %s", cfg.Cluster.ControlPlane.Endpoint), seen: seen}
	if r.Phase == member {
		e.addLoss(w)
	}
	return w
}

// addLoss says what a node waits for that has lost its data.
func (e *Etcd) addLoss(w *wait) {
	w.code = DataLost
	w.what += fmt.Sprintf(" (this node was a member of a cluster, and its data is gone from %s; if the others' is too: gbctl bootstrap --recover-from SNAPSHOT)", e.o.DataDir)
}

// join adds this node to the cluster as a learner.
func (e *Etcd) join(ctx context.Context, r record) error {
	found, c, err := e.cluster(ctx, r)
	if err != nil {
		return err
	}
	defer c.Close()
	me, err := e.o.self()
	cfg, none := configuration.Config(e.o.Store)
	if err = cmp.Or(err, none); err == nil {
		err = e.sameTokens(ctx)
	}
	if err != nil {
		return err
	}
	was := func(m *pb.Member) bool {
		return HexID(m.ID) == r.Member || slices.Contains([]string{"", me.name, cfg.Cluster.Etcd.ExtraArgs.Get("name")}, m.Name)
	}
	members, own, err := e.makeRoom(ctx, c, found.Members, me, was)
	if err != nil {
		return err
	}
	if own == nil {
		f := roster.Facts{Now: time.Now()}
		err := e.askRoster(ctx, &f, func(_, life context.Context) (*clientv3.Client, error) {
			return Dial(life, e.o.Store, c.Endpoints()...)
		})
		if err = cmp.Or(err, f.MayControl(me.name)); err != nil {
			return &wait{what: "the name of this node to be free", cause: err}
		}
		actx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		added, err := c.MemberAddAsLearner(actx, []string{me.peerURL()})
		if err != nil {
			return &wait{what: "etcd's members to let this node in", cause: err}
		}
		members, own = added.Members, added.Member
	}
	r = record{Phase: joining, Member: HexID(own.ID), Cluster: HexID(found.Header.ClusterId)}
	var initial []string
	for _, m := range members {
		name := m.Name
		if m.ID == own.ID {
			name = me.name
		} else {
			r.Peers = append(r.Peers, m.ClientURLs...)
		}
		name = cmp.Or(name, HexID(m.ID)) // etcd compares URLs only
		for _, u := range m.PeerURLs {
			initial = append(initial, name+"="+u)
		}
	}
	r.Initial = strings.Join(initial, ",")
	return e.write(r)
}

// makeRoom removes the member that this node was before it lost its data: that member would never come back. A member
// that was added and never ran can be used as it is: own. was reports whether this node was a member.
func (e *Etcd) makeRoom(ctx context.Context, c *clientv3.Client, members []*pb.Member, me self, was func(*pb.Member) bool) (rest []*pb.Member, own *pb.Member, err error) {
	at := slices.IndexFunc(members, func(m *pb.Member) bool { return slices.Contains(m.PeerURLs, me.peerURL()) })
	if at >= 0 && members[at].IsLearner && members[at].Name == "" {
		return members, members[at], nil
	}
	if at >= 0 {
		old := members[at]
		if !was(old) {
			return nil, nil, &wait{what: fmt.Sprintf("another address for this node: it has that of etcd member %s, which may only be off; should that be gone for good: gbctl etcd remove-member %s",
				called(old), HexID(old.ID))}
		}
		if err := remove(ctx, c, members, old); err != nil {
			return nil, nil, &wait{what: fmt.Sprintf("the cluster to remove etcd member %s, which was this node before its data was lost", called(old)), cause: err}
		}
		members = slices.Delete(slices.Clone(members), at, at+1)
	}
	// etcd accepts one learner at a time.
	if i := slices.IndexFunc(members, func(m *pb.Member) bool { return m.IsLearner }); i >= 0 {
		m := members[i]
		return nil, nil, &wait{what: fmt.Sprintf("etcd member %s at %s to be promoted; should it be gone for good: gbctl etcd remove-member %s",
			called(m), strings.Join(m.PeerURLs, ", "), HexID(m.ID))}
	}
	return members, nil, nil
}

// promote promotes a learner to a voting member after it has the cluster's
// data. An error means that it isn't a member any more.
func (e *Etcd) promote(ctx context.Context, event eventFunc) error {
	r := e.unsettled.Load()
	if r == nil || r.Phase != joining {
		return nil
	}
	once := event.onlyChanges()
	for range sleep.Every(ctx, promoteRetry) {
		err := e.promoteOnce(ctx, *r)
		switch {
		case err == nil:
			event("", fmt.Sprintf("etcd member %s has the cluster's data and votes", r.Member))
			return nil
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, rpctypes.ErrMemberNotFound):
			return fmt.Errorf("the cluster has removed etcd member %s while it joined", r.Member)
		case errors.Is(err, rpctypes.ErrMemberLearnerNotReady):
			once(Learner, fmt.Sprintf("Waiting for etcd member %s, a learner, to have the cluster's data", r.Member))
		default:
			once(Learner, fmt.Sprintf("Waiting for the cluster to promote etcd member %s, a learner: %v", r.Member, err))
		}
	}
	return nil
}

func (e *Etcd) promoteOnce(ctx context.Context, r record) error {
	_, c, err := e.cluster(ctx, r)
	if err != nil {
		return err
	}
	defer c.Close()
	id, err := parseID(r.Member)
	if err != nil {
		return err
	}
	pctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if _, err := c.MemberPromote(pctx, id); err != nil && !errors.Is(err, rpctypes.ErrMemberNotLearner) {
		return err
	}
	return e.settle(ctx, r)
}
