package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

// orders are the sort orders of processes, the largest first except by PID.
var orders = map[string]func(a, b *apiv1.Process) int{
	"rss": func(a, b *apiv1.Process) int { return cmp.Compare(b.ResidentMemory, a.ResidentMemory) },
	"cpu": func(a, b *apiv1.Process) int {
		return cmp.Compare(b.CpuTime.AsDuration(), a.CpuTime.AsDuration())
	},
	"pid": func(a, b *apiv1.Process) int { return cmp.Compare(a.Pid, b.Pid) },
}

func (a *app) processesCommand() *cobra.Command {
	var by string
	cmd := &cobra.Command{
		Use:     "processes",
		Aliases: []string{"ps"},
		Short:   "Show the running processes",
		Example: `  gbctl -n 10.5.0.2 processes --sort cpu`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			order := orders[by]
			if order == nil {
				return usagef("--sort %s: must be rss, cpu or pid", by)
			}
			head := []string{"PID", "PARENT", "STATE", "THREADS", "CPU TIME", "VIRTUAL", "RESIDENT", "COMMAND"}
			return list(cmd.Context(), a, head, func(ctx context.Context, c *client.Client) (*apiv1.ProcessesResponse, error) {
				return message(c.Node.Processes(ctx, connect.NewRequest(&apiv1.ProcessesRequest{})))
			}, func(m *apiv1.ProcessesResponse) (rows [][]string) {
				slices.SortStableFunc(m.Processes, order)
				for _, p := range m.Processes {
					rows = append(rows, []string{strconv.Itoa(int(p.Pid)), strconv.Itoa(int(p.Ppid)), p.State, strconv.Itoa(int(p.Threads)),
						p.CpuTime.AsDuration().Round(10 * time.Millisecond).String(), size(p.VirtualMemory), size(p.ResidentMemory), cmp.Or(p.Args, p.Command)})
				}
				return rows
			})
		},
	}
	cmd.Flags().StringVar(&by, "sort", "rss", "sort order: rss, cpu or pid")
	return a.outputFlag(cmd)
}

func (a *app) memoryCommand() *cobra.Command {
	return a.outputFlag(&cobra.Command{
		Use:     "memory",
		Short:   "Show memory usage",
		Long:    "Show the memory usage of nodes. -o yaml shows all values of proc_meminfo(5), in bytes.",
		Example: `  gbctl -n 10.5.0.2,10.5.0.3 memory`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			head := []string{"TOTAL", "USED", "AVAILABLE", "FREE", "BUFFERS", "CACHED", "PID 1"}
			return list(cmd.Context(), a, head, func(ctx context.Context, c *client.Client) (*apiv1.MemoryResponse, error) {
				return message(c.Node.Memory(ctx, connect.NewRequest(&apiv1.MemoryRequest{})))
			}, func(m *apiv1.MemoryResponse) [][]string {
				i := m.Meminfo
				used := i["MemTotal"] - min(i["MemAvailable"], i["MemTotal"])
				return [][]string{{size(i["MemTotal"]), size(used), size(i["MemAvailable"]), size(i["MemFree"]), size(i["Buffers"]), size(i["Cached"]), size(m.Pid1Pss)}}
			})
		},
	})
}

func (a *app) mountsCommand() *cobra.Command {
	return a.outputFlag(&cobra.Command{
		Use:     "mounts",
		Short:   "Show the mounted file systems and their usage",
		Example: `  gbctl -n 10.5.0.2 mounts`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			head := []string{"MOUNTED ON", "SOURCE", "TYPE", "SIZE", "AVAILABLE", "USED"}
			return list(cmd.Context(), a, head, func(ctx context.Context, c *client.Client) (*apiv1.MountsResponse, error) {
				return message(c.Node.Mounts(ctx, connect.NewRequest(&apiv1.MountsRequest{})))
			}, func(m *apiv1.MountsResponse) (rows [][]string) {
				for _, mount := range m.Mounts {
					row := []string{mount.Target, mount.Source, mount.Type, "", "", ""}
					if mount.Size > 0 {
						used := 100 * float64(mount.Size-min(mount.Available, mount.Size)) / float64(mount.Size)
						row = append(row[:3], size(mount.Size), size(mount.Available), fmt.Sprintf("%.0f%%", used))
					}
					rows = append(rows, row)
				}
				return rows
			})
		},
	})
}

func (a *app) disksCommand() *cobra.Command {
	return a.insecureFlags(a.outputFlag(&cobra.Command{
		Use:   "disks",
		Short: "Show the disks, for machine.install.disk",
		Example: `  gbctl -n 10.5.0.2 disks
  gbctl -n 10.5.0.4 disks --insecure               in maintenance mode`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			head := []string{"DEVICE", "SIZE", "MODEL", "SERIAL", "BUS", "READ-ONLY", "SYSTEM", "CONTENT"}
			return list(cmd.Context(), a, head, func(ctx context.Context, c *client.Client) (*apiv1.DisksResponse, error) {
				return message(c.Node.Disks(ctx, connect.NewRequest(&apiv1.DisksRequest{})))
			}, func(m *apiv1.DisksResponse) (rows [][]string) {
				for _, d := range m.Disks {
					rows = append(rows, []string{d.Device, size(d.Size), d.Model, d.Serial, d.Bus, yes(d.ReadOnly), yes(d.System), d.Content})
				}
				return rows
			})
		},
	}))
}

func (a *app) netstatCommand() *cobra.Command {
	r := &apiv1.NetstatRequest{}
	cmd := &cobra.Command{
		Use:     "netstat",
		Short:   "Show network connections and listening sockets",
		Example: `  gbctl -n 10.5.0.2 netstat -l`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			head := []string{"PROTOCOL", "LOCAL", "REMOTE", "STATE", "RECEIVE QUEUE", "SEND QUEUE", "PROCESS"}
			return list(cmd.Context(), a, head, func(ctx context.Context, c *client.Client) (*apiv1.NetstatResponse, error) {
				return message(c.Node.Netstat(ctx, connect.NewRequest(r)))
			}, func(m *apiv1.NetstatResponse) (rows [][]string) {
				for _, s := range m.Sockets {
					process := ""
					if s.Pid > 0 {
						process = fmt.Sprintf("%d/%s", s.Pid, s.Command)
					}
					rows = append(rows, []string{s.Protocol, s.Local, s.Remote, s.State, strconv.FormatUint(s.ReceiveQueue, 10), strconv.FormatUint(s.SendQueue, 10), process})
				}
				return rows
			})
		},
	}
	cmd.Flags().BoolVarP(&r.ListeningOnly, "listening", "l", false, "show only listening sockets")
	return a.outputFlag(cmd)
}

func (a *app) timeCommand() *cobra.Command {
	return a.outputFlag(&cobra.Command{
		Use:   "time",
		Short: "Show the clocks and their time servers",
		Long: `Show the clocks of nodes and their time servers. OFFSET is the last measured difference
to the time server, and ERROR the maximum error of the clock.`,
		Example: `  gbctl -n 10.5.0.2,10.5.0.3 time`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			head := []string{"TIME", "SYNCED", "SERVER", "OFFSET", "ERROR", "MESSAGE"}
			return list(cmd.Context(), a, head, func(ctx context.Context, c *client.Client) (*apiv1.TimeResponse, error) {
				return message(c.Node.Time(ctx, connect.NewRequest(&apiv1.TimeRequest{})))
			}, func(m *apiv1.TimeResponse) [][]string {
				return [][]string{{stampUTC(m.Now.AsTime()), strconv.FormatBool(m.Synced), m.Server, m.Offset.AsDuration().String(), m.Error.AsDuration().String(), m.Message}}
			})
		},
	})
}

func (a *app) containersCommand() *cobra.Command {
	r := &apiv1.ContainersRequest{}
	cmd := &cobra.Command{
		Use:     "containers",
		Aliases: []string{"c"},
		Short:   "Show the containers of the system or of Kubernetes",
		Long: `Show the containers that containerd runs: those of the system, or with -k those of
Kubernetes, each below the sandbox of its pod. It also works while Kubernetes is down.
'gbctl logs -k' accepts the ID.`,
		Example: `  gbctl -n 10.5.0.2 containers
  gbctl -n 10.5.0.2 c -k`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			head := []string{"NAMESPACE", "ID", "IMAGE", "PID", "STATUS"}
			return list(cmd.Context(), a, head, func(ctx context.Context, c *client.Client) (*apiv1.ContainersResponse, error) {
				return message(c.Node.Containers(ctx, connect.NewRequest(r)))
			}, func(m *apiv1.ContainersResponse) (rows [][]string) {
				for _, c := range m.Containers {
					id := c.Id
					if c.InPod {
						id = "└─ " + id
					}
					rows = append(rows, []string{c.Namespace, id, c.Image, strconv.Itoa(int(c.Pid)), c.Status})
				}
				return rows
			})
		},
	}
	cmd.Flags().BoolVarP(&r.Kubernetes, "kubernetes", "k", false, "show the containers of Kubernetes")
	return a.outputFlag(cmd)
}

// shortDigest shortens a digest for tables.
func shortDigest(digest string) string {
	algorithm, sum, ok := strings.Cut(digest, ":")
	if !ok || len(sum) < 12 {
		return digest
	}
	return algorithm + ":" + sum[:12]
}
