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
	alarms := rowsOf((*apiv1.EtcdAlarmsResponse).GetAlarms, func(e *apiv1.EtcdAlarm) []string { return []string{e.Member, e.Alarm} })
	alarmHead := []string{"MEMBER", "ALARM"}
	statusHead := []string{"ID", "NAME", "ROLE", "VERSION", "SIZE", "IN USE", "TERM", "INDEX", "PROBLEMS"}
	remove := &apiv1.EtcdRemoveMemberRequest{}
	leave := messageCommand(a, "leave", nil, asking(ofEtcd, etcdAPI.Leave, &apiv1.EtcdLeaveRequest{}))
	leave.PreRun = func(cmd *cobra.Command, _ []string) { a.raiseTimeout(cmd, leaveTimeout) }
	return group("etcd",
		a.etcdMembersCommand(),
		listCommand(a, "status", statusHead, asking(ofEtcd, etcdAPI.Status, &apiv1.EtcdStatusRequest{}), rowsOf((*apiv1.EtcdStatusResponse).GetMembers, etcdRow)),
		a.etcdSnapshotCommand(),
		a.etcdDefragmentCommand(),
		group("alarm",
			listCommand(a, "list", alarmHead, asking(ofEtcd, etcdAPI.Alarms, &apiv1.EtcdAlarmsRequest{}), alarms),
			listCommand(a, "disarm", alarmHead, asking(ofEtcd, etcdAPI.DisarmAlarms, &apiv1.EtcdDisarmAlarmsRequest{}), alarms)),
		messageCommand(a, "forfeit-leadership", nil, asking(ofEtcd, etcdAPI.ForfeitLeadership, &apiv1.EtcdForfeitLeadershipRequest{})),
		messageCommand(a, "remove-member ID", &remove.Id, asking(ofEtcd, etcdAPI.RemoveMember, remove)),
		leave)
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
	return command("snapshot FILE", func(cmd *cobra.Command, args []string) error {
		return a.untimed(cmd.Context(), "etcd snapshot", func(ctx context.Context, c *client.Client) error {
			n, err := saveSnapshot(ctx, c, args[0], a.progressBar())
			if err != nil {
				return err
			}
			fmt.Fprintf(a.notes(), "%s: %s in %s\n", c.Name, size(n), args[0])
			return nil
		})
	})
}

// saveSnapshot writes the data of a node's etcd to a new file.
func saveSnapshot(ctx context.Context, c *client.Client, path string, show *progressBar) (uint64, error) {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("%s exists already: choose another name", path)
	}
	to := &checksumWriter{hash: sha256.New()}
	err := writeNew(path, func(f *os.File) error {
		to.to = f
		err := client.Receive(ctx, c.Etcd.Snapshot, &apiv1.EtcdSnapshotRequest{}, func(m *apiv1.FileChunk) error {
			_, err := to.Write(m.Data)
			show.at(fmt.Sprintf("%s: %s so far", c.Name, size(to.bytes)), 0, 0)
			return err
		})
		if show.end(); err != nil {
			return err
		}
		return to.check()
	})
	return to.bytes, err
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
	return command("defrag", func(cmd *cobra.Command, _ []string) error {
		a.raiseTimeout(cmd, defragmentTimeout)
		return printEach(cmd.Context(), a, asking(ofEtcd, etcdAPI.Defragment, &apiv1.EtcdDefragmentRequest{}), func(m *apiv1.EtcdDefragmentResponse) []string {
			return []string{fmt.Sprintf("%s before, %s now", size(m.SizeBefore), size(m.SizeAfter))}
		})
	})
}
