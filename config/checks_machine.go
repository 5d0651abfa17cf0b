package config

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"
)

var (
	labelName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	// registryHost is the name of a registry as image references spell it.
	registryHost = regexp.MustCompile(`^(\*|[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?|\[[0-9a-fA-F:]+\](:[0-9]+)?)$`)

	// kubeletLabels are the labels and prefixes within Kubernetes' own domains that a
	// kubelet may set on its own node. With others, it doesn't start (NodeRestriction,
	// https://kubernetes.io/docs/reference/access-authn-authz/admission-controllers/).
	kubeletLabels = []string{
		"kubernetes.io/hostname", "kubernetes.io/arch", "kubernetes.io/os", "beta.kubernetes.io/arch", "beta.kubernetes.io/os",
		"node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type", "topology.kubernetes.io/region", "topology.kubernetes.io/zone",
		"failure-domain.beta.kubernetes.io/region", "failure-domain.beta.kubernetes.io/zone",
	}
	kubeletDomains = []string{"kubelet.kubernetes.io", "node.kubernetes.io"}
)

func checkNodeLabels(c *Config, r *report) {
	for _, key := range slices.Sorted(maps.Keys(c.Machine.Kubelet.NodeLabels)) {
		where := at("machine", "kubelet", "nodeLabels", key)
		slash := strings.LastIndexByte(key, '/')
		domain, name := key[:max(slash, 0)], key[slash+1:]
		if (inDomain(domain, "kubernetes.io") || inDomain(domain, "k8s.io")) && !slices.Contains(kubeletLabels, key) &&
			!slices.ContainsFunc(kubeletDomains, func(d string) bool { return inDomain(domain, d) }) {
			r.bad(where, "a kubelet may not set this label on itself; did you mean node.kubernetes.io/%s", name)
		}
	}
}

// checkLabel requires a name with or without a domain before a slash.
func checkLabel(key string) error {
	slash := strings.LastIndexByte(key, '/')
	if !labelName.MatchString(key[slash+1:]) || slash >= 0 && !IsDNSName(key[:slash]) {
		return errors.New("is not the name of a label")
	}
	return nil
}

func inDomain(name, domain string) bool { return name == domain || strings.HasSuffix(name, "."+domain) }

func checkRegistries(c *Config, r *report) {
	mirrors := at("machine", "registries", "mirrors")
	for _, host := range slices.Sorted(maps.Keys(c.Machine.Registries.Mirrors)) {
		mirror := c.Machine.Registries.Mirrors[host]
		for i, u := range mirror.Endpoints {
			if u.User != nil {
				r.bad(mirrors.with(host, "endpoints", i), "has a user: that belongs to machine.registries.config")
			}
			if mirror.OverridePath && RegistryPath(u.URL, true) == "" {
				r.bad(mirrors.with(host, "endpoints", i), "has no path, which overridePath needs: append /v2, or leave overridePath out")
			}
		}
	}
	if c.Machine.Registries.Config["*"].Auth != nil {
		r.bad(at("machine", "registries", "config", "*", "auth"), "would give the credentials to every host: name the hosts that they are for, such as registry.example.org:5000")
	}
}

// MinPartition is the smallest partition of a data disk, in bytes: mkfs.xfs refuses less than 300 MiB.
const MinPartition = 320 << 20

func checkDisks(c *Config, r *report) {
	for i, disk := range c.Machine.Disks {
		where := at("machine", "disks", i)
		if disk.Device == "" && disk.DiskSelector == (DiskSelector{}) {
			r.lacks(where.with("device"), "or a diskSelector")
		}
		if disk.Wipe && !exact(disk.DiskSelector.Serial) && !exact(disk.DiskSelector.WWID) && !strings.HasPrefix(disk.Device, "/dev/disk/by-id/") {
			r.bad(where.with("wipe"), "needs a disk that is named for good: a device in /dev/disk/by-id, or a diskSelector with serial or wwid, without an asterisk. Other names can be those of another disk after the next boot")
		}
		for n, p := range disk.Partitions {
			where := where.with("partitions", n, "size")
			if p.Size == 0 && n < len(disk.Partitions)-1 {
				r.lacks(where, "only the last partition can have the rest of the disk")
			} else if p.Size != 0 && p.Size < MinPartition {
				r.bad(where, "is less than 320 MiB")
			}
		}
	}
}

// exact reports whether a property of a selector is that of one disk.
func exact(pattern string) bool { return pattern != "" && !strings.Contains(pattern, "*") }

func checkRegistryHost(host string) error {
	if bare, found := strings.CutPrefix(host, "https://"); found {
		return fmt.Errorf("is a host, not a URL; did you mean %s", quote(strings.TrimRight(bare, "/")))
	} else if !registryHost.MatchString(host) {
		return errors.New("is not the host of a registry, such as docker.io, or '*'")
	}
	return nil
}

func checkEnv(c *Config, r *report) {
	spelled := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(c.Machine.Sysctls)) {
		if other, twice := spelled[SysctlPath(name)]; twice {
			r.bad(at("machine", "sysctls", name), "is the same parameter as %s", other)
		}
		spelled[SysctlPath(name)] = name
	}
}

func checkSysfsPath(name string) error {
	if !fs.ValidPath(name) || !strings.Contains(name, "/") {
		return errors.New("is not a path below /sys, such as block/sda/queue/scheduler")
	}
	return nil
}

func checkEncryption(c *Config, r *report) {
	for _, e := range c.Encrypted() {
		for i, key := range e.Keys {
			if key.TPM != nil && e.where[1] == "disks" {
				r.bad(e.where.with("keys", i, "tpm"), "is for the system's disk: the TPM gives no more keys once that is open; use static, which is on STATE")
			}
			if key.KMS != nil && key.KMS.Endpoint.Host != "" && key.KMS.Endpoint.String() != "https://"+key.KMS.Endpoint.Host {
				r.bad(e.where.with("keys", i, "kms", "endpoint"), "must be https://HOST:PORT, and nothing more")
			}
		}
	}
}
