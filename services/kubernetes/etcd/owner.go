package etcd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protowire"

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

const (
	// walHead is how much of a log file is read: the needed records at its
	// beginning have less than 200 bytes.
	walHead = 4 << 10
	// walRecords is how many records are searched for the metadata, which is the second one.
	walRecords = 4

	// From etcd's log, go.etcd.io/etcd/server/v3/storage/wal: the type of the
	// record, and where the length of a record ends and that of its padding begins.
	walMetadata   = 1
	walLengthBits = 56
	walPadding    = 7
)

// identity is the member and the cluster of the data in a directory.
type identity struct{ member, cluster uint64 }

// identity reads it from the beginning of etcd's log, so that it is known even
// if etcd doesn't run. ok is false if there is no log yet.
func (e *Etcd) identity() (id identity, ok bool, err error) {
	dir := filepath.Join(e.o.DataDir, "member", "wal")
	names, err := untrusted.Glob(dir, "*.wal") // sorted: they have numbers
	if err != nil || len(names) == 0 {
		return identity{}, false, err
	}
	file, err := untrusted.Open(names[0])
	if err != nil {
		return identity{}, false, boot.IgnoreMissing(err) // purged just now
	}
	defer file.Close()
	head := make([]byte, walHead)
	n, err := io.ReadFull(file, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return identity{}, false, err
	}
	id, err = parseIdentity(head[:n])
	if err != nil {
		return identity{}, false, fmt.Errorf("etcd's log %s: %w", names[0], err)
	}
	return id, true, nil
}

var errNoMetadata = errors.New("it has no IDs of member and cluster at its beginning: it was truncated, or is of another release of etcd")

// parseIdentity finds the metadata among the first records. Each is a length of
// 64 bits, whose upper byte is about padding, and a protobuf message.
func parseIdentity(head []byte) (identity, error) {
	for range walRecords {
		if len(head) < 8 {
			break
		}
		length := binary.LittleEndian.Uint64(head)
		size := length & (1<<walLengthBits - 1)
		if length>>63 != 0 {
			size += length >> walLengthBits & walPadding
		}
		head = head[8:]
		if size == 0 || size > uint64(len(head)) {
			break
		}
		// A record has its type and its data; it ends where the padding begins.
		if numbers, texts := fields(head[:size]); numbers[1] == walMetadata {
			numbers, _ = fields(texts[3])
			if numbers[1] == 0 || numbers[2] == 0 {
				return identity{}, errNoMetadata
			}
			return identity{member: numbers[1], cluster: numbers[2]}, nil
		}
		head = head[size:]
	}
	return identity{}, errNoMetadata
}

// fields are the numbers and the texts of a message, by the number of the field, until a field
// can't be read.
func fields(b []byte) (numbers map[protowire.Number]uint64, texts map[protowire.Number][]byte) {
	numbers, texts = map[protowire.Number]uint64{}, map[protowire.Number][]byte{}
	for len(b) > 0 {
		n, t, used := protowire.ConsumeTag(b)
		if used < 0 {
			break
		}
		b = b[used:]
		switch t {
		case protowire.VarintType:
			numbers[n], used = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			texts[n], used = protowire.ConsumeBytes(b)
		default:
			used = protowire.ConsumeFieldValue(n, t, b)
		}
		if used < 0 {
			break
		}
		b = b[used:]
	}
	return numbers, texts
}
