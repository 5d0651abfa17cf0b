package etcd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

const (
	// watchPeriod is how often a running member is checked: the other members
	// change only by commands of users.
	watchPeriod = 30 * time.Second
	// unhealthyFor is how long a member may be without a quorum before the others
	// are asked whether it still is a member: an election takes seconds.
	unhealthyFor = 25 * time.Second
	// examineTimeout limits that request: most often there is no answer, and the
	// other members may be waiting for this one.
	examineTimeout = 5 * time.Second
	// maxOwner bounds the file of the owner, which has two digests.
	maxOwner = 64 << 10
)

// errRemoved: the data belongs to a member that the cluster has removed.
var errRemoved = errors.New("the cluster has removed this member")

// owner is the cluster that the data was begun for. It is stored beside the data and not
// on STATE, so that data which outlives an installation can be distinguished from data
// which outlives the loss of STATE.
type owner struct {
	Cluster   string `json:"cluster"`   // hexadecimal
	Authority string `json:"authority"` // SHA-256 of a certificate of etcd's CA
}

func (e *Etcd) ownerFile() string { return e.o.DataDir + ".owner" }

func (e *Etcd) readOwner() (owner, error) {
	var o owner
	data, err := untrusted.ReadFile(e.ownerFile(), maxOwner)
	if err != nil {
		return o, boot.IgnoreMissing(err)
	}
	if json.Unmarshal(data, &o) != nil {
		return owner{}, nil // unknown, as without the file
	}
	return o, nil
}

// own records that the data belongs to this cluster.
func (e *Etcd) own(id identity) error {
	authorities, err := e.authorities()
	if err != nil {
		return err
	}
	want := owner{Cluster: HexID(id.cluster), Authority: authorities[0]}
	if has, err := e.readOwner(); err != nil || has.Cluster == want.Cluster && slices.Contains(authorities, has.Authority) {
		return err
	}
	data, err := json.Marshal(want)
	if err != nil {
		return err
	}
	return untrusted.WriteFile(e.ownerFile(), append(data, '\n'), 0o600)
}

// authorities are all that are accepted.
func (e *Etcd) authorities() (all []string, err error) {
	keys, err := secrets.Etcd.Get(e.o.Store, secrets.EtcdID)
	if err != nil {
		return nil, err
	}
	for block, rest := pem.Decode(bytes.TrimSpace(keys.Spec.CA)); block != nil; block, rest = pem.Decode(rest) {
		all = append(all, fmt.Sprintf("%x", sha256.Sum256(block.Bytes)))
	}
	if len(all) == 0 {
		return nil, errors.New("etcd's authority: no certificate")
	}
	return all, nil
}

// foreignData returns a *wait if the data is known to be another cluster's. The
// journal records what this installation did, so it decides; without it, the owner file
// beside the data. If neither has the cluster, the data counts as this cluster's.
func (e *Etcd) foreignData(r record) error {
	id, ok, err := e.identity()
	if err != nil || !ok {
		return nil // etcd reports what is wrong with it
	}
	cluster := HexID(id.cluster)
	if r.Cluster == cluster {
		return nil
	}
	if r.Cluster != "" {
		return e.foreignDataError(id, "this node is a member of cluster "+r.Cluster)
	}
	has, err := e.readOwner()
	authorities, none := e.authorities()
	if err = cmp.Or(err, none); err != nil {
		return err
	}
	if has.Cluster == cluster && !slices.Contains(authorities, has.Authority) {
		return e.foreignDataError(id, "its authority isn't that of cluster.etcd.ca in this node's configuration")
	}
	return nil
}

// foreignDataError is the *wait for data of another cluster.
func (e *Etcd) foreignDataError(id identity, why string) error {
	return &wait{code: ForeignData, what: fmt.Sprintf("a decision: %s holds data of another etcd cluster (member %s of cluster %s): %s. Of an earlier installation, remove it: gbctl -n ADDRESS reset --graceful=false --system-labels-to-wipe EPHEMERAL --reboot. To be kept, it needs the configuration that it was begun with",
		e.o.DataDir, HexID(id.member), HexID(id.cluster), why)}
}

// examine asks the other members about a member that isn't healthy: errRemoved,
// or a *wait if they are another cluster. It is nil if no other node contradicts.
func (e *Etcd) examine(ctx context.Context, r record) error {
	id, ok, err := e.identity()
	if err != nil || !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, examineTimeout)
	defer cancel()
	found, c, err := e.cluster(ctx, r)
	if err != nil {
		return nil
	}
	defer c.Close()
	switch {
	case found.Header.ClusterId != id.cluster:
		return e.foreignDataError(id, fmt.Sprintf("the control planes at %s are cluster %s", strings.Join(c.Endpoints(), ", "), HexID(found.Header.ClusterId)))
	case !slices.ContainsFunc(found.Members, func(m *pb.Member) bool { return m.ID == id.member }):
		return errRemoved
	}
	return nil
}

// watch checks a running member until ctx ends: while it is healthy, watch records the
// other members; when it isn't, watch asks them about it. An error ends the run.
func (e *Etcd) watch(ctx context.Context) error {
	if r, err := e.read(); err == nil {
		e.greet(ctx, r.Peers) // they let this node in, which may have another address
	}
	for sleep.For(ctx, watchPeriod) {
		if err := e.watchOnce(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (e *Etcd) watchOnce(ctx context.Context) error {
	if e.unsettled.Load() != nil {
		return nil // an operation reports about it
	}
	if e.ready.Load() {
		// The list is for later, and is requested again soon.
		_ = e.notePeers(ctx)
		return nil
	}
	if last := e.well.Load(); last == nil || time.Since(*last) < unhealthyFor {
		return nil
	}
	r, err := e.read()
	if err != nil {
		return err
	}
	return e.examine(ctx, r)
}

// notePeers records the addresses of the other members in the journal, if they have changed.
func (e *Etcd) notePeers(ctx context.Context) error {
	c, found, err := e.askLocal(ctx, clientv3.WithSerializable())
	if err != nil {
		return err
	}
	defer c.Close()
	var peers []string
	for _, m := range found.Members {
		if m.ID != found.Header.MemberId {
			peers = append(peers, m.ClientURLs...)
			err = errors.Join(err, e.Meet(m.PeerURLs...))
		}
	}
	if err != nil {
		return err
	}
	slices.Sort(peers)
	return e.inTurn(ctx, func() error {
		r, err := e.read()
		if err != nil || r.Phase != member || slices.Equal(r.Peers, peers) {
			return err
		}
		r.Peers = peers
		return e.write(r)
	})
}
