package etcd

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
)

const (
	journalFile = boot.StateDir + "/etcd.json"
	// tokenSize in bytes: two clusters never have the same one by accident.
	tokenSize = 16
)

// phase is the stage of this member's life.
type phase string

const (
	none    phase = ""        // nothing was begun, as far as this node knows
	fresh   phase = "new"     // it begins a cluster
	joining phase = "joining" // it was added as a learner
	member  phase = "member"  // it is a voting member
	waiting phase = "waiting" // it has left, or a recovery was undone: it begins no cluster by itself
)

// record is what this node has begun with its data directory. It is written
// before that happens.
type record struct {
	Phase phase `json:"phase,omitempty"`
	// Token distinguishes the cluster that was begun here from any other at the
	// same addresses: etcd derives the IDs of cluster and members from it.
	Token string `json:"token,omitempty"`
	// Member is its ID, in hexadecimal as etcd writes it; Cluster the cluster's.
	Member  string `json:"member,omitempty"`
	Cluster string `json:"cluster,omitempty"`
	// Initial is the membership at the time when it joined: name=URL,name=URL.
	Initial string `json:"initial,omitempty"`
	// Peers are the last known client URLs of the other members: they are asked
	// while Kubernetes doesn't answer.
	Peers []string `json:"peers,omitempty"`
	// Snapshot is the SHA-256 of the snapshot that its cluster was recovered from.
	Snapshot string `json:"snapshot,omitempty"`
}

// errUnreadable: the file exists, and isn't a valid record.
var errUnreadable = errors.New("isn't one that this release knows")

// read returns the zero record if nothing was begun.
func (e *Etcd) read() (record, error) {
	var r record
	data, err := os.ReadFile(e.o.Journal)
	if err != nil {
		return r, boot.IgnoreMissing(err)
	}
	if err := json.NewDecoder(bytes.NewReader(data)).Decode(&r); err != nil {
		return r, fmt.Errorf("etcd's journal %s %w: %w", e.o.Journal, errUnreadable, err)
	}
	return r, nil
}

// readOrPutAside is read, for the holder of turn. Without a journal, a node with
// data continues, and a node without data begins nothing while it can find a
// cluster. Users can't repair the file on the node, so it must not block the node.
func (e *Etcd) readOrPutAside() (record, error) {
	r, err := e.read()
	if !errors.Is(err, errUnreadable) {
		return r, err
	}
	aside := e.o.Journal + ".unreadable"
	e.o.Log.Error("the journal of etcd can't be read and is put aside: what this node has begun is unknown", "as", aside, "error", err)
	if err := os.Rename(e.o.Journal, aside); err != nil {
		return record{}, err
	}
	return record{}, boot.SyncDir(filepath.Dir(aside))
}

// write is called by the holder of turn.
func (e *Etcd) write(r record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = boot.WriteFile(e.o.Journal, append(data, '\n'), 0o600)
	}
	if err == nil {
		e.keep(r)
	}
	return err
}

// keep records whether anything is left to do for r.
func (e *Etcd) keep(r record) {
	if r.Phase == fresh || r.Phase == joining {
		e.unsettled.Store(&r)
	} else {
		e.unsettled.Store(nil)
	}
}

// settle ends a beginning: from now on, an empty data directory means lost data.
func (e *Etcd) settle(ctx context.Context, r record) error {
	return e.inTurn(ctx, func() error {
		if id, ok, err := e.identity(); err != nil {
			// etcd serves with it, which is enough. The API server waits for this.
			e.o.Log.Warn("the identity of etcd's data isn't known, so other data in its place can't be detected", "error", err)
		} else if ok {
			r.Member, r.Cluster = HexID(id.member), HexID(id.cluster)
		}
		r.Phase, r.Initial = member, ""
		return e.write(r)
	})
}

// inTurn waits for turn, and calls do while it has it.
func (e *Etcd) inTurn(ctx context.Context, do func() error) error {
	if err := e.turn.Acquire(ctx, 1); err != nil {
		return fmt.Errorf("wait for a join that is under way: %w", err)
	}
	defer e.turn.Release(1)
	return do()
}

func newToken() string {
	var b [tokenSize]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	return hex.EncodeToString(b[:])
}

// begun is the journal, and whether there is data.
func (e *Etcd) begun() (r record, data bool, err error) {
	if r, err = e.read(); err == nil {
		data, err = e.hasData()
	}
	return r, data, err
}

// hasData reports whether the data directory has any content.
func (e *Etcd) hasData() (bool, error) {
	entries, err := untrusted.ReadDir(e.o.DataDir)
	return len(entries) > 0, boot.IgnoreMissing(err)
}

// hasLog reports whether a member has begun its log there: etcd makes other
// files before it knows whether it can join.
func (e *Etcd) hasLog() bool {
	entries, err := untrusted.ReadDir(filepath.Join(e.o.DataDir, "member", "wal"))
	return boot.IgnoreMissing(err) != nil || len(entries) > 0
}

// clean empties a data directory whose node is no member.
func (e *Etcd) clean() error {
	entries, err := untrusted.ReadDir(e.o.DataDir)
	if err != nil {
		return boot.IgnoreMissing(err)
	}
	for _, entry := range entries {
		if err := untrusted.RemoveAll(filepath.Join(e.o.DataDir, entry.Name())); err != nil {
			return err
		}
	}
	return untrusted.Sync(e.o.DataDir)
}
