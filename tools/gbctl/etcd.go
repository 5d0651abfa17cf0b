package main

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

const (
	// defragmentTimeout is longer than a node needs to defragment the largest database.
	defragmentTimeout = 4 * time.Minute
	// leaveTimeout is longer than a node needs to count the members, remove its own one,
	// stop it and delete its data.
	leaveTimeout = 2 * time.Minute
)

// raiseTimeout sets a longer timeout for a slow request, unless the user has set one.
func (a *app) raiseTimeout(cmd *cobra.Command, d time.Duration) {
	if !cmd.Flags().Changed("timeout") {
		a.timeout = d
	}
}

func (a *app) etcdCommand() *cobra.Command {
	return group(&cobra.Command{Use: "etcd"}, a.etcdMembersCommand(), a.etcdStatusCommand(), a.etcdSnapshotCommand(), a.etcdDefragmentCommand(), a.etcdAlarmCommand(),
		a.etcdForfeitCommand(), a.etcdRemoveCommand(), a.etcdLeaveCommand())
}

func (a *app) etcdMembersCommand() *cobra.Command {
	return listCommand(a, "members", []string{"ID", "NAME", "VOTES", "PEER URLS", "CLIENT URLS", "CLUSTER"}, asking(ofEtcd, etcdAPI.Members, &apiv1.EtcdMembersRequest{}), func(m *apiv1.EtcdMembersResponse) [][]string {
		return ofEach(m.Members, func(e *apiv1.EtcdMember) []string {
			return []string{e.Id, e.Name, votes(e), strings.Join(e.PeerUrls, ","), strings.Join(e.ClientUrls, ","), m.ClusterId}
		})
	})
}

func votes(m *apiv1.EtcdMember) string {
	if m.Learner {
		return "not yet"
	}
	return "yes"
}

func (a *app) etcdStatusCommand() *cobra.Command {
	return listCommand(a, "status", []string{"ID", "NAME", "ROLE", "VERSION", "SIZE", "IN USE", "TERM", "INDEX", "PROBLEMS"}, asking(ofEtcd, etcdAPI.Status, &apiv1.EtcdStatusRequest{}), rowsOf((*apiv1.EtcdStatusResponse).GetMembers, etcdRow))
}

func etcdRow(s *apiv1.EtcdMemberStatus) []string {
	if s.Error != "" {
		return []string{s.Member.Id, s.Member.Name, "no answer", "", "", "", "", "", s.Error}
	}
	role := "follower"
	switch {
	case s.Leader:
		role = "leader"
	case s.Member.Learner:
		role = "learner"
	}
	return []string{
		s.Member.Id, s.Member.Name, role, s.Version, size(s.Size), size(s.SizeInUse), fmt.Sprint(s.RaftTerm), fmt.Sprint(s.RaftIndex),
		strings.Join(s.Problems, "; "),
	}
}

func (a *app) etcdSnapshotCommand() *cobra.Command {
	return &cobra.Command{
		Use: "snapshot FILE",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.untimed(cmd.Context(), "etcd snapshot", func(ctx context.Context, c *client.Client) error {
				n, err := saveSnapshot(ctx, c, args[0], a.progressBar())
				if err != nil {
					return err
				}
				fmt.Fprintf(a.notes(), "%s: %s in %s\n", c.Name, size(n), args[0])
				return nil
			})
		},
	}
}

// saveSnapshot writes to a temporary file until the data is complete.
func saveSnapshot(ctx context.Context, c *client.Client, path string, show *progressBar) (_ uint64, err error) {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("%s exists already: choose another name", path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*") // 0600
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	to := &checksumWriter{to: f, hash: sha256.New()}
	if err := client.Receive(ctx, c.Etcd.Snapshot, &apiv1.EtcdSnapshotRequest{}, func(m *apiv1.FileChunk) error {
		_, err := to.Write(m.Data)
		show.at(fmt.Sprintf("%s: %s so far", c.Name, size(to.bytes)), 0, 0)
		return err
	}); err != nil {
		return 0, err
	}
	show.end()
	if err := to.check(); err != nil {
		return 0, err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return 0, err
	}
	return to.bytes, putInPlace(f.Name(), path)
}

// checksumWriter checks a stream that ends with the SHA-256 of the data before it.
type checksumWriter struct {
	to    io.Writer
	hash  hash.Hash
	tail  []byte // the last bytes, which may be the checksum
	bytes uint64
}

func (s *checksumWriter) Write(p []byte) (int, error) {
	s.bytes += uint64(len(p))
	s.tail = append(s.tail, p...)
	if over := len(s.tail) - sha256.Size; over > 0 {
		s.hash.Write(s.tail[:over])
		s.tail = append(s.tail[:0], s.tail[over:]...)
	}
	return s.to.Write(p)
}

func (s *checksumWriter) check() error {
	if subtle.ConstantTimeCompare(s.hash.Sum(nil), s.tail) != 1 {
		return fmt.Errorf("the snapshot is damaged or incomplete: the SHA-256 of its %d bytes doesn't match", s.bytes)
	}
	return nil
}

func (a *app) etcdDefragmentCommand() *cobra.Command {
	return &cobra.Command{
		Use: "defrag",
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.raiseTimeout(cmd, defragmentTimeout)
			return a.sequential(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				m, err := client.Unary(ctx, c.Etcd.Defragment, &apiv1.EtcdDefragmentRequest{})
				if err != nil {
					return err
				}
				fmt.Fprintf(a.out, "%s: %s before, %s now\n", c.Name, size(m.SizeBefore), size(m.SizeAfter))
				return nil
			})
		},
	}
}

func (a *app) etcdAlarmCommand() *cobra.Command {
	rows := rowsOf((*apiv1.EtcdAlarmsResponse).GetAlarms, func(e *apiv1.EtcdAlarm) []string { return []string{e.Member, e.Alarm} })
	head := []string{"MEMBER", "ALARM"}
	return group(&cobra.Command{Use: "alarm"},
		listCommand(a, "list", head, asking(ofEtcd, etcdAPI.Alarms, &apiv1.EtcdAlarmsRequest{}), rows),
		listCommand(a, "disarm", head, asking(ofEtcd, etcdAPI.DisarmAlarms, &apiv1.EtcdDisarmAlarmsRequest{}), rows),
	)
}

func (a *app) etcdForfeitCommand() *cobra.Command {
	return messageCommand(a, "forfeit-leadership", nil, asking(ofEtcd, etcdAPI.ForfeitLeadership, &apiv1.EtcdForfeitLeadershipRequest{}))
}

func (a *app) etcdRemoveCommand() *cobra.Command {
	r := &apiv1.EtcdRemoveMemberRequest{}
	return messageCommand(a, "remove-member ID", &r.Id, asking(ofEtcd, etcdAPI.RemoveMember, r))
}

func (a *app) etcdLeaveCommand() *cobra.Command {
	cmd := messageCommand(a, "leave", nil, asking(ofEtcd, etcdAPI.Leave, &apiv1.EtcdLeaveRequest{}))
	cmd.PreRun = func(cmd *cobra.Command, _ []string) { a.raiseTimeout(cmd, leaveTimeout) }
	return cmd
}
