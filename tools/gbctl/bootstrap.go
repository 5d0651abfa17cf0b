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
	"time"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

const (
	// bootstrapTimeout is longer than a node needs to look for a running cluster twice:
	// once to join it, and once to verify that there is none.
	bootstrapTimeout = time.Minute
	// recoverTimeout is long enough for a node to receive and restore the largest
	// snapshot.
	recoverTimeout = 75 * time.Minute
	// nameTimeout limits the lookup of the addresses of other control planes: after five
	// seconds, the resolver repeats the query or uses another name server.
	nameTimeout = 8 * time.Second
	// snapshotChunk is the size of one message of the upload.
	snapshotChunk = 64 << 10
)

func (a *app) bootstrapCommand() *cobra.Command {
	var snapshot string
	var raw bool
	cmd := command("bootstrap", func(cmd *cobra.Command, _ []string) error {
		if snapshot == "" && raw {
			return usagef("--skip-hash-check needs --recover-from")
		}
		if cmd.Flags().Changed("recover-from") {
			return a.recoverFrom(cmd, snapshot, raw)
		}
		a.raiseTimeout(cmd, bootstrapTimeout)
		return printMessage(cmd.Context(), a, "bootstrapping", func(ctx context.Context, c *client.Client) (*apiv1.BootstrapResponse, error) {
			return client.Unary(ctx, c.Etcd.Bootstrap, &apiv1.BootstrapRequest{ControlPlanes: a.otherAddresses(ctx, c.Name)})
		})
	})
	cmd.Flags().StringVar(&snapshot, "recover-from", "", "file with a snapshot of the lost etcd cluster")
	cmd.Flags().BoolVar(&raw, "skip-hash-check", false, "the file is a copy of a member's database (member/snap/db), without a SHA-256 at its end")
	_ = cmd.MarkFlagFilename("recover-from")
	return cmd
}

// otherAddresses returns the addresses of all nodes of the context except the given one.
// Names are resolved here: the node accepts only addresses, because it may have no name
// server yet, or a different one.
func (a *app) otherAddresses(ctx context.Context, node string) []string {
	c, err := a.access()
	if err != nil || c == nil {
		return nil
	}
	named := slices.DeleteFunc(once(slices.Concat(a.reach(c), c.Nodes)), func(other string) bool { return other == node })
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	found := make([][]netip.Addr, len(named))
	errs := parallel(len(named), func(i int) (err error) {
		found[i], err = resolve(ctx, named[i])
		return err
	})
	var all []string
	for i, name := range named {
		if errs[i] != nil {
			fmt.Fprintf(a.err, "%s: not checked for a running cluster: %v\n", name, errs[i])
		}
		for _, address := range found[i] {
			all = append(all, address.Unmap().WithZone("").String())
		}
	}
	return once(all)
}

// resolve returns the addresses of a node that is given by name or address.
func resolve(ctx context.Context, node string) ([]netip.Addr, error) {
	host, _, err := client.Address(node)
	if err != nil {
		return nil, err
	}
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host) // an address resolves to itself
}

// recoverFrom sends a snapshot. It checks the file first, so that a damaged one isn't
// sent.
func (a *app) recoverFrom(cmd *cobra.Command, path string, raw bool) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	if info, err := file.Stat(); err == nil { // a large file takes a while
		fmt.Fprintf(a.notes(), "checking %s (%s)\n", path, size(uint64(info.Size())))
	}
	first, err := firstMessage(file, raw)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	a.raiseTimeout(cmd, recoverTimeout)
	return printMessage(cmd.Context(), a, "recovering", func(ctx context.Context, c *client.Client) (*apiv1.BootstrapResponse, error) {
		first.ControlPlanes = a.otherAddresses(ctx, c.Name)
		fmt.Fprintf(a.notes(), "%s: sending %s (%s), then waiting until it is restored\n", c.Name, path, size(first.Size))
		return sendSnapshot(ctx, c, file, first, a.progressBar())
	})
}

// firstMessage returns the first message of the upload. It leaves the read position at
// the start of the file.
func firstMessage(file *os.File, raw bool) (*apiv1.RecoverRequest, error) {
	whole := sha256.New()
	ends := &checksumWriter{to: io.Discard, hash: sha256.New()}
	n, err := io.Copy(io.MultiWriter(whole, ends), file)
	if err != nil {
		return nil, err
	}
	if !raw {
		if err := ends.check(); err != nil {
			return nil, fmt.Errorf("%w (a copy of a member's database has no SHA-256: use --skip-hash-check)", err)
		}
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return &apiv1.RecoverRequest{Size: uint64(n), Sha256: whole.Sum(nil), SkipHashCheck: raw}, nil
}

func sendSnapshot(ctx context.Context, c *client.Client, from io.Reader, first *apiv1.RecoverRequest, show *progressBar) (*apiv1.BootstrapResponse, error) {
	stream, done := c.Etcd.Recover(ctx), uint64(0)
	err := stream.Send(first)
	buf := make([]byte, snapshotChunk)
	for err == nil {
		var n int
		if n, err = io.ReadFull(from, buf); n > 0 {
			if sent := stream.Send(&apiv1.RecoverRequest{Data: buf[:n]}); sent != nil {
				err = sent
			}
			done += uint64(n)
			show.at(fmt.Sprintf("%s: %s of %s", c.Name, size(done), size(first.Size)), done, first.Size)
		}
	}
	show.end()
	// A node that refuses answers before it has read everything.
	answer, closed := stream.CloseAndReceive()
	if closed != nil {
		return nil, closed
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, err
	}
	return answer.Msg, nil
}
