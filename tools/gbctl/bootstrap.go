package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

const (
	// bootstrapTimeout is longer than a node takes to look in vain for a cluster, twice:
	// to join it, and to see that there is none.
	bootstrapTimeout = time.Minute
	// recoverTimeout is for a node to take in and restore the largest snapshot.
	recoverTimeout = 75 * time.Minute
	// nameTimeout bounds the question for the addresses of other control planes: a name
	// server that doesn't answer is asked again after five seconds, or another one is.
	nameTimeout = 8 * time.Second
	// snapshotChunk is a message of the stream to the node.
	snapshotChunk = 64 << 10
)

func (a *app) bootstrapCommand() *cobra.Command {
	var snapshot string
	var raw bool
	cmd := &cobra.Command{
		Use:   "bootstrap",
		Short: "Begin the cluster, on one control plane, once",
		Long: `Begin the cluster on one control plane. All others join it by themselves.

Name exactly one node, by its own address and not by one that the control planes
share. It is safe to ask again: a node that has begun the cluster says so, with the same
cluster ID. A node with data of a cluster refuses, and so does one that sees a living cluster: at the
endpoint, on the control planes that it knows of, or on the nodes and endpoints of the
context. One of these whose name can't be looked up here isn't asked, and is named.
A node of type init needs no bootstrap.

With --recover-from, it begins with what is in a snapshot ('gbctl etcd snapshot').
That is for a cluster that has lost its etcd for good, and makes a new one of it:
what was written after the snapshot is lost. The node must have no data of etcd: one
that has, and each other member of the lost cluster that is still there, is emptied
with 'gbctl reset --graceful=false --system-labels-to-wipe EPHEMERAL --reboot'; the
others join after that. Where they still have a quorum, nothing is recovered.`,
		Example: `  gbctl -n 10.5.0.2 bootstrap
  gbctl -n 10.5.0.2 bootstrap --recover-from etcd.db`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if snapshot == "" && raw {
				return usagef("--skip-hash-check is for --recover-from")
			}
			if cmd.Flags().Changed("recover-from") {
				return a.recoverFrom(cmd, snapshot, raw)
			}
			a.raiseTimeout(cmd, bootstrapTimeout)
			return a.said(cmd.Context(), "bootstrapping", func(ctx context.Context, c *client.Client) (interface{ GetMessage() string }, error) {
				return message(c.Etcd.Bootstrap(ctx, connect.NewRequest(&apiv1.BootstrapRequest{ControlPlanes: a.otherAddresses(ctx, c.Name)})))
			})
		},
	}
	cmd.Flags().StringVar(&snapshot, "recover-from", "", "a file with a snapshot of a lost cluster's etcd")
	cmd.Flags().BoolVar(&raw, "skip-hash-check", false, "the file is a copy of a member's database (member/snap/db), and has no SHA-256 at its end")
	_ = cmd.MarkFlagFilename("recover-from")
	return cmd
}

// otherAddresses are the addresses of the nodes that the context knows, but for the one that
// is asked. Names are looked up here: the node takes addresses only, since it may have
// no name server yet, or another one.
func (a *app) otherAddresses(ctx context.Context, node string) []string {
	c, err := a.access()
	if err != nil || c == nil {
		return nil
	}
	endpoints := a.endpoints
	if len(endpoints) == 0 {
		endpoints = c.Endpoints
	}
	var named []string
	for _, other := range slices.Concat(endpoints, c.Nodes) {
		if other != node && !slices.Contains(named, other) {
			named = append(named, other)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	found, errs := make([][]netip.Addr, len(named)), make([]error, len(named))
	var wg sync.WaitGroup
	for i, name := range named {
		wg.Go(func() { found[i], errs[i] = resolve(ctx, name) })
	}
	wg.Wait()
	var all []string
	for i, name := range named {
		if errs[i] != nil {
			fmt.Fprintf(a.err, "%s: isn't asked whether it belongs to a cluster already: %v\n", name, errs[i])
		}
		for _, address := range found[i] {
			if text := address.Unmap().WithZone("").String(); !slices.Contains(all, text) {
				all = append(all, text)
			}
		}
	}
	return all
}

// resolve are the addresses of a node as people write it.
func resolve(ctx context.Context, node string) ([]netip.Addr, error) {
	host, _, err := client.Address(node)
	if err != nil {
		return nil, err
	}
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host) // an address is its own
}

// recoverFrom sends a snapshot that is looked at here first: what is damaged needn't
// travel.
func (a *app) recoverFrom(cmd *cobra.Command, path string, raw bool) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	if info, err := file.Stat(); err == nil { // that of a large cluster takes a while
		fmt.Fprintf(a.err, "checking %s (%s)\n", path, size(uint64(info.Size())))
	}
	first, err := firstMessage(file, raw)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	a.raiseTimeout(cmd, recoverTimeout)
	return a.said(cmd.Context(), "recovering", func(ctx context.Context, c *client.Client) (interface{ GetMessage() string }, error) {
		first.ControlPlanes = a.otherAddresses(ctx, c.Name)
		fmt.Fprintf(a.err, "%s: sending %s (%s), and waiting until it is restored\n", c.Name, path, size(first.Size))
		return sendSnapshot(ctx, c, file, first)
	})
}

// firstMessage is the first message about a snapshot, which leaves the file at its
// beginning.
func firstMessage(file *os.File, raw bool) (*apiv1.RecoverRequest, error) {
	whole := sha256.New()
	ends := &checksumWriter{to: io.Discard, hash: sha256.New()}
	n, err := io.Copy(io.MultiWriter(whole, ends), file)
	if err != nil {
		return nil, err
	}
	if !raw {
		if err := ends.check(); err != nil {
			return nil, fmt.Errorf("%w (a copy of a member's database has none: --skip-hash-check)", err)
		}
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return &apiv1.RecoverRequest{Size: uint64(n), Sha256: whole.Sum(nil), SkipHashCheck: raw}, nil
}

func sendSnapshot(ctx context.Context, c *client.Client, from io.Reader, first *apiv1.RecoverRequest) (*apiv1.BootstrapResponse, error) {
	stream := c.Etcd.Recover(ctx)
	err := stream.Send(first)
	buf := make([]byte, snapshotChunk)
	for err == nil {
		var n int
		if n, err = io.ReadFull(from, buf); n > 0 {
			if sent := stream.Send(&apiv1.RecoverRequest{Data: buf[:n]}); sent != nil {
				err = sent
			}
		}
	}
	// A node that refuses says so before it has read everything.
	answer, closed := stream.CloseAndReceive()
	if closed != nil {
		return nil, closed
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, err
	}
	return answer.Msg, nil
}
