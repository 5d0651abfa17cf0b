package etcd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
)

const (
	// maxSnapshot is the largest database that etcd supports, and its sum.
	maxSnapshot = 8<<30 + sha256.Size
	// sectorSize: the size of a database is a multiple of it, so that of a
	// snapshot with its sum isn't.
	sectorSize = 512
	// spareRoom is left on the disk in addition to the snapshot and the data made from it.
	spareRoom = 256 << 20
	// uploadTimeout is for the largest snapshot over a line of 20 Mbit/s.
	uploadTimeout = time.Hour
	// restoreTimeout is for a copy of the largest database on a slow disk, twice, and
	// for pulling etcd's image before that.
	restoreTimeout = 10 * time.Minute

	// revisionBump is how far the new cluster's revisions are above those of the
	// snapshot. Kubernetes' clients have seen later ones. With a revision above
	// them all, and the older ones compacted, they read everything again. etcd's
	// documentation recommends a billion for Kubernetes.
	revisionBump = 1_000_000_000

	uploadName   = "snapshot.part"
	snapshotName = "snapshot.db"
	restoredName = "data"

	// A database begins with a page header of 16 bytes and this number, in the
	// byte order of the machine: go.etcd.io/bbolt.
	boltMagic  = 0xED0CDAED
	boltAt     = 16
	boltHeader = boltAt + 4
)

// errRecovering: only one at a time.
var errRecovering = errors.New("a snapshot is being sent to this node already")

// Snapshot describes the snapshot that Receive reads.
type Snapshot struct {
	Size   uint64            // bytes
	SHA256 [sha256.Size]byte // of all of it
	// Raw: it is a copy of a member's database, without a sum at its end.
	Raw bool
	// ControlPlanes are addresses that the caller knows.
	ControlPlanes []string
}

// recoveryDir is on the same file system as the data.
func (e *Etcd) recoveryDir() string { return e.o.DataDir + ".recovery" }

func (e *Etcd) recoveryPath(name string) string { return filepath.Join(e.recoveryDir(), name) }

// Receive takes a snapshot of a cluster that is lost, for RecoverOperation:
//
//	upload ─ checked ─▶ snapshot.db ─ RecoverOperation: restored aside ─ renamed ─▶ record: new ─▶ etcd starts
//
// A power cut between any two of these loses nothing: the operation continues from the uploaded
// file, until the restored directory is in its place, which is one atomic step. Members of the
// lost cluster are foreign to the new one, which has another token and another ID.
//
// already is the cluster that was begun with this snapshot before; the caller then
// has nothing to do. Otherwise it starts the operation, and calls release after that.
func (e *Etcd) Receive(ctx context.Context, s Snapshot, from io.Reader) (already *Begun, release func(), err error) {
	if !e.uploading.TryLock() {
		return nil, nil, refuse("recover: %w", errRecovering)
	}
	if already, err = e.receive(ctx, s, from); already != nil || err != nil {
		e.uploading.Unlock()
		if err != nil {
			err = fmt.Errorf("recover: %w", err)
		}
		return already, nil, err
	}
	return nil, e.uploading.Unlock, nil
}

func (e *Etcd) receive(ctx context.Context, s Snapshot, from io.Reader) (*Begun, error) {
	if err := cmp.Or(s.check(), e.idle()); err != nil {
		return nil, err
	}
	// Before the upload, and again after it.
	var already *Begun
	if err := e.inTurn(ctx, func() (err error) { _, already, err = e.clear(ctx, s); return err }); err != nil || already != nil {
		return already, err
	}
	if err := e.upload(ctx, s, from); err != nil {
		return nil, errors.Join(err, untrusted.RemoveAll(e.recoveryPath(uploadName)))
	}
	if err := untrusted.Rename(e.recoveryPath(uploadName), e.recoveryPath(snapshotName)); err != nil {
		return nil, err
	}
	return nil, errors.Join(untrusted.Sync(e.recoveryDir()), untrusted.Sync(filepath.Dir(e.recoveryDir())))
}

func (s Snapshot) check() error {
	switch {
	case s.Size > maxSnapshot:
		return refuse("the snapshot has %d bytes, of at most %d", s.Size, int64(maxSnapshot))
	case s.Size < boltHeader+sha256.Size:
		return refuse("the snapshot has only %d bytes: it isn't one of etcd", s.Size)
	case !s.Raw && s.Size%sectorSize != sha256.Size:
		return refuse("the snapshot doesn't end with its SHA-256: it is incomplete, or a copy of member/snap/db, which --skip-hash-check takes")
	}
	return nil
}

// clear is called by the holder of turn. It checks whether anything prevents the recovery.
func (e *Etcd) clear(ctx context.Context, s Snapshot) (r record, already *Begun, err error) {
	if why := e.o.skip(); why != "" {
		return r, nil, refuse("%s", why)
	}
	r, data, err := e.begun()
	if err != nil {
		return r, nil, err
	}
	switch {
	case data && r.Snapshot == hexSum(s) && (r.Phase == fresh || r.Phase == member):
		return r, &Begun{Token: r.Token, Cluster: r.Cluster, Already: true}, nil
	case data:
		return r, nil, refuse("%s isn't empty: %s", e.o.DataDir, resetHint)
	case e.going.Load():
		return r, nil, refuse("etcd just starts on this node: see `gbctl service etcd`")
	}
	return r, nil, e.alone(ctx, r, s.ControlPlanes, lookTimeout, seen.living)
}

// upload receives the snapshot, and checks it.
func (e *Etcd) upload(ctx context.Context, s Snapshot, from io.Reader) error {
	ctx, cancel := context.WithTimeout(ctx, uploadTimeout)
	defer cancel()
	if err := errors.Join(untrusted.MkdirAll(e.recoveryDir(), 0o700), e.room(s.Size)); err != nil {
		return err
	}
	file, err := untrusted.OpenFile(e.recoveryPath(uploadName), os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(file, sum), sleep.Reader(ctx, io.LimitReader(from, int64(s.Size)+1)))
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return refuse("the disk is full: %s has no room for the snapshot", filepath.Dir(e.o.DataDir))
	case err != nil:
		return fmt.Errorf("receive the snapshot: %w after %d of %d bytes", err, n, s.Size)
	case uint64(n) != s.Size:
		return refuse("the snapshot was to have %d bytes, and other than that came: it is sent again from the beginning", s.Size)
	case [sha256.Size]byte(sum.Sum(nil)) != s.SHA256:
		return refuse("the snapshot isn't the file that was to be sent: its SHA-256 is another one")
	}
	if err := s.checkFile(ctx, file); err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// room refuses a snapshot if the disk has no room for it and the database made from it.
func (e *Etcd) room(size uint64) error {
	var f syscall.Statfs_t
	if err := syscall.Statfs(e.recoveryDir(), &f); err != nil {
		return fmt.Errorf("how much room there is in %s: %w", e.recoveryDir(), err)
	}
	if free, need := f.Bavail*uint64(f.Bsize), 2*size+spareRoom; free < need {
		return refuse("the disk is too full: a snapshot of %d MiB needs %d MiB in %s, where %d are free", size>>20, need>>20, filepath.Dir(e.o.DataDir), free>>20)
	}
	return nil
}

// checkFile sees that what was received is a database of etcd, with the right SHA-256 at its end.
func (s Snapshot) checkFile(ctx context.Context, file io.ReaderAt) error {
	head, sum, body := make([]byte, boltHeader), make([]byte, sha256.Size), sha256.New()
	end := int64(s.Size) - sha256.Size
	_, err := file.ReadAt(head, 0)
	if err == nil && !s.Raw {
		_, err = file.ReadAt(sum, end)
	}
	if err == nil && !s.Raw {
		_, err = io.Copy(body, sleep.Reader(ctx, io.NewSectionReader(file, 0, end)))
	}
	switch {
	case err != nil:
		return fmt.Errorf("read the snapshot again: %w", err)
	case !s.Raw && !bytes.Equal(body.Sum(nil), sum):
		return refuse("the snapshot is damaged: the SHA-256 at its end doesn't fit what is before it")
	case binary.NativeEndian.Uint32(head[boltAt:]) != boltMagic:
		return refuse("the snapshot isn't a database of etcd")
	}
	return nil
}

// prepareRestore checks again whether anything prevents the recovery, before the first attempt.
func (e *Etcd) prepareRestore(ctx context.Context, a RecoverArguments) error {
	sum, err := hex.DecodeString(a.SHA256)
	if err != nil || len(sum) != sha256.Size {
		return fmt.Errorf("sha256 %q isn't one", a.SHA256)
	}
	return e.inTurn(ctx, func() error {
		r, already, err := e.clear(ctx, Snapshot{SHA256: [sha256.Size]byte(sum), Raw: a.Raw, ControlPlanes: a.ControlPlanes})
		if err == nil && already == nil && r.Phase == fresh { // a bootstrap that etcd doesn't know yet is replaced
			err = e.write(record{Phase: waiting, Peers: r.Peers})
		}
		return err
	})
}

// restore makes the data directory of a new cluster, which has the token, from the snapshot, whatever an earlier
// attempt has left. After a *wait it should be tried again.
func (e *Etcd) restore(ctx context.Context, a RecoverArguments, token string) error {
	return e.inTurn(ctx, func() error {
		defer e.wake()
		now, data, err := e.begun()
		if err != nil {
			return err
		}
		if now.Snapshot == a.SHA256 && (now.Phase == fresh || now.Phase == member) {
			return nil // done before a restart
		}
		if !data {
			if err := e.restoreAside(ctx, a, token); err != nil {
				return err
			}
		}
		if err := e.write(record{Phase: fresh, Token: token, Snapshot: a.SHA256}); err != nil {
			return err
		}
		return untrusted.RemoveAll(e.recoveryDir())
	})
}

// restoreAside restores into another directory, which then replaces the data
// directory atomically.
func (e *Etcd) restoreAside(ctx context.Context, a RecoverArguments, token string) error {
	aside := e.recoveryPath(restoredName)
	if _, err := untrusted.Stat(e.recoveryPath(snapshotName)); errors.Is(err, fs.ErrNotExist) {
		return errors.New("it is gone from this node: `gbctl bootstrap --recover-from` sends it again")
	}
	if err := errors.Join(untrusted.RemoveAll(aside), untrusted.Give(e.recoveryDir(), boot.Owner(ID), 1)); err != nil {
		return err
	}
	me, err := e.o.self()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout) // other decisions about this member wait for it
	defer cancel()
	said, err := e.utility(ctx, restoreArguments(me, a, token, e.recoveryPath(snapshotName), aside))
	switch exit, isExit := errors.AsType[*containerd.ExitError](err); {
	case isExit:
		return refuse("etcdutl ended with status %d: %s", exit.Status, said)
	case err != nil:
		return &wait{what: "the snapshot to be restored", cause: err}
	}
	if err := errors.Join(untrusted.Chmod(aside, 0o700), syncTree(aside)); err != nil {
		return err
	}
	if err := untrusted.Rename(aside, e.o.DataDir); err != nil {
		return fmt.Errorf("rename %s to %s: %w", aside, e.o.DataDir, err)
	}
	return untrusted.Sync(filepath.Dir(e.o.DataDir))
}

func restoreArguments(me self, a RecoverArguments, token, snapshot, to string) []string {
	args := []string{
		"etcdutl", "snapshot", "restore", snapshot, "--data-dir=" + to,
		"--name=" + me.name, "--initial-advertise-peer-urls=" + me.peerURL(),
		"--initial-cluster=" + me.name + "=" + me.peerURL(), "--initial-cluster-token=" + token,
		"--bump-revision=" + strconv.Itoa(revisionBump), "--mark-compacted",
	}
	if a.Raw {
		args = append(args, "--skip-hash-check")
	}
	return args
}

// syncTree makes everything below dir durable.
func syncTree(dir string) error {
	entries, err := untrusted.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		path, sync := filepath.Join(dir, entry.Name()), untrusted.Sync
		if entry.IsDir() {
			sync = syncTree
		}
		if err := sync(path); err != nil {
			return err
		}
	}
	return untrusted.Sync(dir)
}
