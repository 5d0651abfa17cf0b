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

	"connectrpc.com/connect"
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

// printMessage calls one node and prints the message in its answer.
func (a *app) printMessage(ctx context.Context, what string, ask func(context.Context, *client.Client) (interface{ GetMessage() string }, error)) error {
	return a.one(ctx, what, func(ctx context.Context, c *client.Client) error {
		m, err := ask(ctx, c)
		if err != nil {
			return err
		}
		fmt.Fprintf(a.out, "%s: %s\n", c.Name, visible(m.GetMessage()))
		return nil
	})
}

func (a *app) etcdCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "etcd",
		Short: "Manage etcd, the database of Kubernetes",
		Long: `Manage etcd, the database of Kubernetes. It runs on control planes. Every change needs
a majority of the voting members. A request that would end this majority is refused;
the error lists the members that were counted.`,
	}
	cmd.AddCommand(a.etcdMembersCommand(), a.etcdStatusCommand(), a.etcdSnapshotCommand(), a.etcdDefragmentCommand(), a.etcdAlarmCommand(),
		a.etcdForfeitCommand(), a.etcdRemoveCommand(), a.etcdLeaveCommand())
	return cmd
}

func (a *app) etcdMembersCommand() *cobra.Command {
	return listCommand(a, &cobra.Command{
		Use:     "members",
		Short:   "Show the members of the etcd cluster",
		Example: `  gbctl -n 10.5.0.2 etcd members`,
	}, []string{"ID", "NAME", "VOTES", "PEER URLS", "CLIENT URLS", "CLUSTER"}, func(ctx context.Context, c *client.Client) (*apiv1.EtcdMembersResponse, error) {
		return unary(ctx, c.Etcd.Members, &apiv1.EtcdMembersRequest{})
	}, func(m *apiv1.EtcdMembersResponse) (rows [][]string) {
		for _, e := range m.Members {
			rows = append(rows, []string{e.Id, e.Name, votes(e), strings.Join(e.PeerUrls, ","), strings.Join(e.ClientUrls, ","), m.ClusterId})
		}
		return rows
	})
}

func votes(m *apiv1.EtcdMember) string {
	if m.Learner {
		return "not yet"
	}
	return "yes"
}

func (a *app) etcdStatusCommand() *cobra.Command {
	return listCommand(a, &cobra.Command{
		Use:     "status",
		Short:   "Show the status of each member",
		Example: `  gbctl -n 10.5.0.2 etcd status`,
	}, []string{"ID", "NAME", "ROLE", "VERSION", "SIZE", "IN USE", "TERM", "INDEX", "PROBLEMS"}, func(ctx context.Context, c *client.Client) (*apiv1.EtcdStatusResponse, error) {
		return unary(ctx, c.Etcd.Status, &apiv1.EtcdStatusRequest{})
	}, rowsOf((*apiv1.EtcdStatusResponse).GetMembers, etcdRow))
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
		Use:   "snapshot FILE",
		Short: "Save the database to a file",
		Long: `Save the etcd database of a node to a new file. It contains all data of Kubernetes,
including Secrets. gbctl verifies the SHA-256 while it receives the data. The file
exists only if it is complete. The role os:etcd:backup is sufficient.`,
		Example: `  gbctl -n 10.5.0.2 etcd snapshot etcd.db`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			node, err := a.single(cmd.Context(), "etcd snapshot")
			if err != nil {
				return err
			}
			return collect([]string{node}, []error{a.withClient(cmd.Context(), node, func(ctx context.Context, c *client.Client) error {
				n, err := saveSnapshot(ctx, c, args[0])
				if err != nil {
					return err
				}
				fmt.Fprintf(a.err, "%s: %s in %s\n", c.Name, size(n), args[0])
				return nil
			})})
		},
	}
}

// saveSnapshot writes to a temporary file until the data is complete.
func saveSnapshot(ctx context.Context, c *client.Client, path string) (_ uint64, err error) {
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
	stream, err := c.Etcd.Snapshot(ctx, connect.NewRequest(&apiv1.EtcdSnapshotRequest{}))
	if err := receive(stream, err, func(m *apiv1.FileChunk) error {
		_, err := to.Write(m.Data)
		return err
	}); err != nil {
		return 0, err
	}
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
		Use:   "defrag",
		Short: "Release disk space that etcd no longer uses",
		Long: `Release disk space that the database no longer uses. The member doesn't answer during
this time, so several nodes are defragmented one after another.`,
		Example: `  gbctl -n 10.5.0.2,10.5.0.3 etcd defrag`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.raiseTimeout(cmd, defragmentTimeout)
			return a.sequential(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				m, err := unary(ctx, c.Etcd.Defragment, &apiv1.EtcdDefragmentRequest{})
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
	cmd := &cobra.Command{Use: "alarm", Short: "Show and disarm the alarms of members"}
	rows := rowsOf((*apiv1.EtcdAlarmsResponse).GetAlarms, func(e *apiv1.EtcdAlarm) []string { return []string{e.Member, e.Alarm} })
	head := []string{"MEMBER", "ALARM"}
	cmd.AddCommand(
		listCommand(a, &cobra.Command{
			Use:     "list",
			Short:   "Show the alarms",
			Example: `  gbctl -n 10.5.0.2 etcd alarm list`,
		}, head, func(ctx context.Context, c *client.Client) (*apiv1.EtcdAlarmsResponse, error) {
			return unary(ctx, c.Etcd.Alarms, &apiv1.EtcdAlarmsRequest{})
		}, rows),
		listCommand(a, &cobra.Command{
			Use:   "disarm",
			Short: "Disarm all alarms after their cause is removed",
			Long: `Disarm all alarms, and show the alarms that members raise again at once. The cause of
NOSPACE is removed when the database is compacted and defragmented.`,
			Example: `  gbctl -n 10.5.0.2 etcd alarm disarm`,
		}, head, func(ctx context.Context, c *client.Client) (*apiv1.EtcdAlarmsResponse, error) {
			return unary(ctx, c.Etcd.DisarmAlarms, &apiv1.EtcdDisarmAlarmsRequest{})
		}, rows),
	)
	return cmd
}

func (a *app) etcdForfeitCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "forfeit-leadership",
		Short: "Make another member the leader",
		Long: `Make another member the leader, if the member of the node is the leader. Use it before
work on the machine.`,
		Example: `  gbctl -n 10.5.0.2 etcd forfeit-leadership`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.printMessage(cmd.Context(), "etcd forfeit-leadership", func(ctx context.Context, c *client.Client) (interface{ GetMessage() string }, error) {
				return unary(ctx, c.Etcd.ForfeitLeadership, &apiv1.EtcdForfeitLeadershipRequest{})
			})
		},
	}
}

func (a *app) etcdRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "remove-member ID",
		Short: "Remove the member of a lost node",
		Long: `Remove the member of a node that is lost for good. Run it on another node; 'gbctl etcd
members' shows the ID. 'kubectl delete node' removes the node from Kubernetes. For a
node that still runs, use 'gbctl reset', or 'gbctl etcd leave' if it comes back later.`,
		Example: `  gbctl -n 10.5.0.2 etcd remove-member 8e9e05c52164694d`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.printMessage(cmd.Context(), "etcd remove-member", func(ctx context.Context, c *client.Client) (interface{ GetMessage() string }, error) {
				return unary(ctx, c.Etcd.RemoveMember, &apiv1.EtcdRemoveMemberRequest{Id: args[0]})
			})
		},
	}
}

func (a *app) etcdLeaveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "leave",
		Short: "Remove the member of a node that runs",
		Long: `Remove the member of a node from the etcd cluster, stop the service and delete its
data. It is refused for the last member, and if too few other members would answer.
The node joins again when the service starts: with 'gbctl service etcd start', or after
a reboot.`,
		Example: `  gbctl -n 10.5.0.3 etcd leave`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.raiseTimeout(cmd, leaveTimeout)
			return a.printMessage(cmd.Context(), "etcd leave", func(ctx context.Context, c *client.Client) (interface{ GetMessage() string }, error) {
				return unary(ctx, c.Etcd.Leave, &apiv1.EtcdLeaveRequest{})
			})
		},
	}
}
