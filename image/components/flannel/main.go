// Program flanneld gives each node's pods a route to the pods of all other nodes. It is flannel with the backends that
// a Garboard node can use (vxlan, host-gw, wireguard) and with the Kubernetes API as the place where subnets are kept;
// the command line is that of upstream's flanneld, so that upstream's manifests fit. Upstream's own main also wants
// etcd, a cloud provider's SDK and a C compiler.
//
//	options → subnet manager (watches nodes) → external interface → backend → traffic rules → subnet file → run until SIGTERM
package main

import (
	"context"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/flannel-io/flannel/pkg/backend"
	_ "github.com/flannel-io/flannel/pkg/backend/hostgw"
	_ "github.com/flannel-io/flannel/pkg/backend/vxlan"
	_ "github.com/flannel-io/flannel/pkg/backend/wireguard"
	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/ipmatch"
	"github.com/flannel-io/flannel/pkg/subnet"
	"github.com/flannel-io/flannel/pkg/subnet/kube"
	"github.com/flannel-io/flannel/pkg/trafficmngr"
	"github.com/flannel-io/flannel/pkg/trafficmngr/iptables"
	"github.com/flannel-io/flannel/pkg/trafficmngr/nftables"
	"k8s.io/klog/v2"
)

const (
	// healthHeaderTimeout bounds how long a client may take to send its request: the probe is the kubelet, next door.
	healthHeaderTimeout = 5 * time.Second
	// healthStop is for a probe that is under way when flanneld ends; the answer takes microseconds.
	healthStop = time.Second
)

func main() {
	opts, err := parseOptions(os.Args)
	if err != nil {
		fmt.Fprintln(os.Stderr, "flanneld:", err)
		os.Exit(2)
	}
	if opts.version {
		fmt.Println(version)
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, opts); err != nil {
		klog.Errorf("flanneld ends: %v", err)
		klog.Flush()
		os.Exit(1)
	}
}

// run sets the network up and keeps it until ctx ends.
func run(ctx context.Context, opts *options) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	manager, err := kube.NewSubnetManager(ctx, opts.kubeAPIURL, opts.kubeconfig, opts.annotationPrefix, opts.netConf, opts.setNetworkUnavailable)
	if err != nil {
		return fmt.Errorf("create subnet manager: %w", err)
	}
	if opts.healthzPort > 0 {
		serveHealth(ctx, &running, net.JoinHostPort(opts.healthzIP, strconv.Itoa(opts.healthzPort)))
	}
	config, err := manager.GetNetworkConfig(ctx)
	if err != nil {
		return fmt.Errorf("read network configuration %s: %w", opts.netConf, err)
	}
	if err := checkBridgeFilter(config); err != nil {
		return err
	}
	iface, err := externalInterface(ctx, opts, manager, config)
	if err != nil {
		return err
	}
	be, err := backend.NewManager(ctx, manager, iface).GetBackend(config.BackendType)
	if err != nil {
		return fmt.Errorf("start backend %q: %w", config.BackendType, err)
	}
	network, err := be.RegisterNetwork(ctx, &running, config)
	if err != nil {
		return fmt.Errorf("register network: %w", err)
	}
	if err := setTrafficRules(ctx, opts, config, network); err != nil {
		return err
	}
	if opts.blackholeRoute {
		running.Go(func() { keepBlackhole(ctx, opts.resync(), config, network) })
	}
	lease := network.Lease()
	if err := manager.HandleSubnetFile(opts.subnetFile, config, opts.ipMasq, lease.Subnet, lease.IPv6Subnet, network.MTU()); err != nil {
		klog.Warningf("subnet file %s not written, CNI plugins that read it will wait: %v", opts.subnetFile, err)
	}
	klog.Infof("running: backend %s, interface %s, subnet %s %s, MTU %d", config.BackendType, iface.Iface.Name, lease.Subnet, lease.IPv6Subnet, network.MTU())
	running.Go(func() { network.Run(ctx) })
	if err := manager.CompleteLease(ctx, lease, &running); err != nil {
		return fmt.Errorf("tell the node that its network is up: %w", err)
	}
	<-ctx.Done()
	return nil
}

// checkBridgeFilter refuses to go on with iptables rules that the kernel wouldn't apply to bridged traffic.
func checkBridgeFilter(config *subnet.Config) error {
	if config.EnableNFTables {
		return nil
	}
	for file, wanted := range map[string]bool{"bridge-nf-call-iptables": config.EnableIPv4, "bridge-nf-call-ip6tables": config.EnableIPv6} {
		if _, err := os.Stat("/proc/sys/net/bridge/" + file); wanted && os.IsNotExist(err) {
			return fmt.Errorf("check that module br_netfilter is loaded: %w", err)
		}
	}
	return nil
}

// externalInterface finds the interface that reaches the other nodes: the first match of --iface, then --iface-regex,
// then --iface-can-reach; without any of them, the one with the public IP or the default route.
func externalInterface(ctx context.Context, opts *options, manager subnet.Manager, config *subnet.Config) (*backend.ExternalInterface, error) {
	stack, err := ipmatch.GetIPFamily(config.EnableIPv4, config.EnableIPv6)
	if err != nil {
		return nil, fmt.Errorf("network configuration names neither IPv4 nor IPv6: %w", err)
	}
	public := ipmatch.PublicIPOpts{PublicIP: opts.publicIP, PublicIPv6: opts.publicIPv6}
	if v4, v6 := manager.GetStoredPublicIP(ctx); v4 != "" || v6 != "" {
		public = ipmatch.PublicIPOpts{PublicIP: first(v4, public.PublicIP), PublicIPv6: first(v6, public.PublicIPv6)}
	}
	if len(opts.ifaces) == 0 && len(opts.ifaceRegexes) == 0 && opts.ifaceCanReach == "" {
		found, err := ipmatch.LookupExtIface(first(public.PublicIP, public.PublicIPv6), "", "", stack, public)
		if err != nil {
			return nil, fmt.Errorf("find the interface towards the other nodes: %w", err)
		}
		return found, nil
	}
	var misses []string
	try := func(name, regex, reach string) *backend.ExternalInterface {
		found, err := ipmatch.LookupExtIface(name, regex, reach, stack, public)
		if err != nil {
			misses = append(misses, err.Error())
			return nil
		}
		return found
	}
	for _, name := range opts.ifaces {
		if found := try(name, "", ""); found != nil {
			return found, nil
		}
	}
	for _, regex := range opts.ifaceRegexes {
		if found := try("", regex, ""); found != nil {
			return found, nil
		}
	}
	if opts.ifaceCanReach != "" {
		if found := try("", "", opts.ifaceCanReach); found != nil {
			return found, nil
		}
	}
	return nil, fmt.Errorf("no interface matches what --iface, --iface-regex and --iface-can-reach ask for: %s", strings.Join(misses, "; "))
}

// setTrafficRules installs masquerading and forwarding rules, in the one of the two kinds that is configured, after
// removing what an earlier run may have left in the other.
func setTrafficRules(ctx context.Context, opts *options, config *subnet.Config, network backend.Network) error {
	var use, other trafficmngr.TrafficManager = &iptables.IPTablesManager{}, &nftables.NFTablesManager{}
	if config.EnableNFTables {
		use, other = other, use
	}
	if err := other.CleanUp(ctx); err != nil {
		return fmt.Errorf("remove rules of the unused kind: %w", err)
	}
	if err := use.Init(ctx); err != nil {
		return fmt.Errorf("prepare traffic rules: %w", err)
	}
	if opts.ipMasq {
		before := readSubnetFile(opts.subnetFile)
		err := use.SetupAndEnsureMasqRules(ctx, config.Network, before.subnet, before.network, config.IPv6Network, before.subnet6, before.network6,
			network.Lease(), opts.resyncSeconds, opts.noRandomFully)
		if err != nil {
			return fmt.Errorf("set masquerading rules: %w", err)
		}
	}
	if opts.forwardRules {
		use.SetupAndEnsureForwardRules(ctx, config.Network, config.IPv6Network, opts.resyncSeconds)
	}
	return nil
}

// keepBlackhole makes packets to pod addresses that no pod has end here, rather than leave by the default route and
// come back.
func keepBlackhole(ctx context.Context, every time.Duration, config *subnet.Config, network backend.Network) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if config.EnableIPv4 {
			if err := ip.AddBlackholeV4Route(network.Lease().Subnet.ToIPNet()); err != nil {
				klog.Errorf("blackhole route: %v", err)
			}
		}
		if config.EnableIPv6 {
			if err := ip.AddBlackholeV6Route(network.Lease().IPv6Subnet.ToIPNet()); err != nil {
				klog.Errorf("IPv6 blackhole route: %v", err)
			}
		}
	}
}

func serveHealth(ctx context.Context, running *sync.WaitGroup, address string) {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "flanneld is running") })
	server := &http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: healthHeaderTimeout}
	running.Go(func() {
		if err := server.ListenAndServe(); err != http.ErrServerClosed {
			klog.Errorf("health check on %s: %v", address, err)
		}
	})
	running.Go(func() {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.Background(), healthStop)
		defer cancel()
		_ = server.Shutdown(stop) // the process ends right after
	})
}

func first(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}

// leftover is what the run before this one was told; masquerading rules are replaced only if it differs.
type leftover struct {
	network, subnet   ip.IP4Net
	network6, subnet6 ip.IP6Net
}

// readSubnetFile reads a file of lines KEY=CIDR[,CIDR…]. What is missing or garbled counts as never set.
func readSubnetFile(path string) leftover {
	none6 := ip.IP6Net{IP: (*ip.IP6)(big.NewInt(0))}
	found := leftover{network6: none6, subnet6: none6}
	content, err := os.ReadFile(path)
	if err != nil {
		return found
	}
	for line := range strings.Lines(string(content)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value, _, several := strings.Cut(value, ",")
		_, cidr, err := net.ParseCIDR(value)
		if err != nil || several {
			continue
		}
		switch key {
		case "FLANNEL_NETWORK":
			found.network = ip.FromIPNet(cidr)
		case "FLANNEL_SUBNET":
			found.subnet = ip.FromIPNet(cidr)
		case "FLANNEL_IPV6_NETWORK":
			found.network6 = ip.FromIP6Net(cidr)
		case "FLANNEL_IPV6_SUBNET":
			found.subnet6 = ip.FromIP6Net(cidr)
		}
	}
	return found
}
