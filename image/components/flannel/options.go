package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"k8s.io/klog/v2"
)

// version is set by the linker.
var version = "unknown"

// envPrefix starts the names of environment variables that stand in for flags, as upstream has it: FLANNELD_IP_MASQ for
// --ip-masq.
const envPrefix = "FLANNELD_"

// options are upstream's flags, as far as they concern the backends that are here.
type options struct {
	version               bool
	kubeSubnetMgr         bool
	kubeAPIURL            string
	kubeconfig            string
	annotationPrefix      string
	netConf               string
	subnetFile            string
	setNetworkUnavailable bool
	ifaces, ifaceRegexes  list
	ifaceCanReach         string
	publicIP, publicIPv6  string
	ipMasq                bool
	noRandomFully         bool
	forwardRules          bool
	resyncSeconds         int
	blackholeRoute        bool
	healthzIP             string
	healthzPort           int
}

func (o *options) resync() time.Duration { return time.Duration(o.resyncSeconds) * time.Second }

// list is a flag that may be given several times.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

// parseOptions reads flags, and for those not given the environment.
func parseOptions(args []string) (*options, error) {
	var o options
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	flags.BoolVar(&o.version, "version", false, "print the version and exit")
	flags.BoolVar(&o.kubeSubnetMgr, "kube-subnet-mgr", false, "take subnets from the Kubernetes API; needed, as nothing else is built in")
	flags.StringVar(&o.kubeAPIURL, "kube-api-url", "", "URL of the Kubernetes API; not needed in a pod")
	flags.StringVar(&o.kubeconfig, "kubeconfig-file", "", "kubeconfig; not needed in a pod")
	flags.StringVar(&o.annotationPrefix, "kube-annotation-prefix", "flannel.alpha.coreos.com", "prefix of the node annotations")
	flags.StringVar(&o.netConf, "net-config-path", "/etc/kube-flannel/net-conf.json", "network configuration")
	flags.StringVar(&o.subnetFile, "subnet-file", "/run/flannel/subnet.env", "file to write this node's subnet and MTU to")
	flags.BoolVar(&o.setNetworkUnavailable, "set-node-network-unavailable", true, "set the node's condition NetworkUnavailable to false when ready")
	flags.Var(&o.ifaces, "iface", "interface (name or IP) towards the other nodes; the first that exists of several")
	flags.Var(&o.ifaceRegexes, "iface-regex", "regular expression for that interface's name or IP")
	flags.StringVar(&o.ifaceCanReach, "iface-can-reach", "", "use the interface with the route to this IP")
	flags.StringVar(&o.publicIP, "public-ip", "", "IP at which other nodes reach this one")
	flags.StringVar(&o.publicIPv6, "public-ipv6", "", "IPv6 at which other nodes reach this one")
	flags.BoolVar(&o.ipMasq, "ip-masq", false, "masquerade what leaves the pod network")
	flags.BoolVar(&o.noRandomFully, "ip-masq-fully-random-disable", false, "masquerade without fully random ports")
	flags.BoolVar(&o.forwardRules, "iptables-forward-rules", true, "accept forwarded pod traffic")
	flags.IntVar(&o.resyncSeconds, "iptables-resync", 5, "seconds between checks of the rules")
	flags.BoolVar(&o.blackholeRoute, "ip-blackhole-route", false, "add a blackhole route for the node's own pod CIDR")
	flags.StringVar(&o.healthzIP, "healthz-ip", "0.0.0.0", "address for the health check")
	flags.IntVar(&o.healthzPort, "healthz-port", 0, "port for the health check; 0 for none")
	addLogFlags(flags)

	if err := flags.Parse(args[1:]); err != nil {
		return nil, err
	}
	if err := fromEnvironment(flags); err != nil {
		return nil, err
	}
	if !o.version && !o.kubeSubnetMgr {
		return nil, errors.New("this build keeps subnets in the Kubernetes API only: start it with --kube-subnet-mgr")
	}
	if o.resyncSeconds <= 0 {
		return nil, fmt.Errorf("--iptables-resync %d: must be at least 1 second", o.resyncSeconds)
	}
	return &o, nil
}

// addLogFlags takes over klog's flags that make sense for a program that logs to standard error.
func addLogFlags(flags *flag.FlagSet) {
	var all flag.FlagSet
	klog.InitFlags(&all)
	for _, name := range []string{"v", "vmodule", "log_backtrace_at"} {
		if f := all.Lookup(name); f != nil {
			flags.Var(f.Value, f.Name, f.Usage)
		}
	}
}

func fromEnvironment(flags *flag.FlagSet) error {
	given := map[string]bool{}
	flags.Visit(func(f *flag.Flag) { given[f.Name] = true })
	var problems []error
	flags.VisitAll(func(f *flag.Flag) {
		key := envPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if value := os.Getenv(key); value != "" && !given[f.Name] {
			if err := flags.Set(f.Name, value); err != nil {
				problems = append(problems, fmt.Errorf("environment variable %s=%q: %w", key, value, err))
			}
		}
	})
	return errors.Join(problems...)
}
