package due

// Folders is the table, by folder. It names what a test was written for, not all code that
// runs meanwhile: each node has a network, and few tests can fail because of it alone.
var Folders = map[string]Folder{
	"qemu/e2e/adopt": {All: []string{
		"tools/gbctl/gen*.go", "config/pki", "config/generate.go", "services/kubernetes/secrets", "services/kubernetes/etcd", "services/kubernetes/controlplane",
	}},
	"qemu/e2e/attacks": {
		All: []string{"services/front/api"},
		Tests: map[string][]string{
			"TestPodWithTheFileSystem": {"boot/untrusted", "services/front/sandbox", "services/system/logship", "services/core/logs"},
			"TestFirewall":             {"services/kubernetes/firewall"},
		},
	},
	"qemu/e2e/badinput": {
		All: []string{"boot/source", "boot/medium.go", "boot/cmdline.go", "services/system/disk", "services/system/disks", "services/system/volume", "services/system/media"},
		Tests: map[string][]string{
			"TestBadConfiguration":       {"config", "services/system/configuration", "services/front/console"},
			"TestNoDiskNoDHCP":           {"services/system/network"},
			"TestForeignDiskWipedNoTime": {"services/system/clock"},
		},
	},
	"qemu/e2e/bootstrap": {All: []string{
		"services/kubernetes/etcd", "services/kubernetes/peers", "services/kubernetes/kubelet", "tools/gbctl/bootstrap.go", "tools/gbctl/health.go",
	}},
	"qemu/e2e/broken": {
		All:   []string{"services/operations/doctor", "services/kubernetes/containerd/registries.go", "services/system/resolver/resolver.go", "services/front/api/service.go"},
		Tests: map[string][]string{"TestOutageOfEtcd": {"services/kubernetes/controlplane/staticfile.go", "services/kubernetes/etcd"}},
	},
	"qemu/e2e/clients": {All: []string{"api", "services/front", "services/kubernetes/kubeclient", "tools/gbctl/kubeconfig.go"}},
	"qemu/e2e/clock":   {All: []string{"services/system/clock", "services/kubernetes/secrets", "init/stage1.go", "init/stage2.go"}},
	"qemu/e2e/configure": {
		All: []string{"config", "services/system/configuration", "services/system/files", "services/system/sysctl", "services/kubernetes/controlplane", "services/kubernetes/kubelet"},
		Tests: map[string][]string{
			"TestConfigureInContainer": {"tools/gbctl/apply.go", "tools/gbctl/edit.go", "tools/gbctl/inplace.go"},
			"TestRowsOnANode":          {"services/kubernetes/containerd", "services/system/udev"},
		},
	},
	"qemu/e2e/convert": {
		All: []string{"services/operations/convertk8s", "services/operations/rollout", "services/kubernetes/controlplane"},
		Tests: map[string][]string{
			"TestS301Convert":          {"qemu/selfhosted", "image/components/podcheckpointer", "tools/gbctl/kubernetes.go", "tools/gbctl/operation.go"},
			"TestConvertIsInterrupted": {"services/core/operation", "tools/gbctl/follow.go"},
		},
	},
	"qemu/e2e/create": {All: []string{
		"qemu", "tools/devcluster", "tools/gbctl/cluster*.go", "tools/gbctl/progress.go",
	}},
	"qemu/e2e/docker": {All: []string{"qemu/docker", "qemu/dockernodes.go", "qemu/containers.go", "qemu/container"}},
	"qemu/e2e/dualstack": {All: []string{
		"config/families.go", "services/kubernetes/kubelet", "services/kubernetes/controlplane", "services/system/network", "image/components/flannel", "qemu/network", "qemu/plan.go",
	}},
	"qemu/e2e/endpoint": {All: []string{"services/operations/reendpoint", "services/kubernetes/balancer", "api/balance", "services/kubernetes/peers", "services/front/trustd"}},
	"qemu/e2e/extensions": {All: []string{
		"boot/extension", "image/extensions", "services/kubernetes/extension", "image/rootfs",
	}},
	"qemu/e2e/full": {All: []string{
		"services/core/logs", "services/operations/doctor", "services/kubernetes/containerd", "services/system/disk", "services/system/disks", "services/system/volume",
	}},
	"qemu/e2e/host": {All: []string{"qemu/container", "qemu/host.go", "qemu/network", "init"}},
	"qemu/e2e/installed": {All: []string{
		"boot/esp", "boot/meta", "boot/signed", "boot/authenticode", "image/release", "boot/slots.go", "boot/layout.go", "services/system/slots", "services/system/install", "services/system/disk", "services/system/disks",
		"services/system/volume", "services/system/volumes", "services/system/media",
		"services/operations/lifecycle", "init",
	}},
	"qemu/e2e/joining": {All: []string{"services/kubernetes/roster", "services/kubernetes/peers", "services/front/trustd", "services/front/apid", "services/kubernetes/secrets"}},
	"qemu/e2e/load": {All: []string{
		"services/operations/lifecycle", "services/system/install", "services/system/slots", "services/kubernetes/etcd",
	}},
	"qemu/e2e/machines": {
		All: []string{"qemu/machines.go", "qemu/vm"},
		Tests: map[string][]string{
			"TestMachines":                      {"image/initramfs", "kernel", "init", "tools/gbctl/cluster*.go"},
			"TestHardenedKernel":                {"boot/hardening.go", "boot/settings.yaml", "init/settings.go", "kernel"},
			"TestWireGuard":                     {"services/system/network", "qemu/wireguard.go"},
			"TestSilentCard":                    {"services/system/network"},
			"TestCardsChangeNames":              {"services/system/network", "services/system/udev"},
			"TestIPv6OnlyInQEMU":                {"services/system/network", "services/system/install", "config/families.go"},
			"TestEncryptRunningNode":            {"services/system/disks", "services/operations/lifecycle", "tools/gbctl/encrypt.go", "tools/gbctl/power.go"},
			"TestEncryptedMachine":              {"services/system/luks", "services/system/disks", "services/system/volume", "boot/meta", "image/rootfs", "kernel"},
			"TestRecoveryKeyAfterANewMainboard": {"services/system/luks", "services/system/disks", "services/system/configuration", "services/front/apid", "tools/gbctl/recoverykey.go"},
		},
	},
	"qemu/e2e/maintenance": {
		All: []string{"boot/source", "services/system/configuration", "services/front/console"},
		Tests: map[string][]string{
			"TestMetalInQEMU":       {"kernel", "image/initramfs", "services/system/udev", "services/system/disk", "services/system/disks", "services/system/luks", "services/system/volume", "services/system/media"},
			"TestMaintenanceInQEMU": {"services/front/apid", "tools/gbctl/apply.go", "tools/gbctl/machine.go"},
		},
	},
	"qemu/e2e/manifests": {All: []string{"services/kubernetes/controlplane", "services/kubernetes/kubeclient"}},
	"qemu/e2e/media": {Tests: map[string][]string{
		"TestSecureBoot":                 {"image/media", "image/secureboot", "image/loader", "boot/esp", "boot/authenticode", "services/system/slots", "services/system/install", "services/system/tpm", "services/system/luks", "services/system/disks", "init"},
		"TestMediumInUEFI":               {"image/media", "image/loader", "boot/esp", "services/system/install", "services/front/console", "services/system/disk", "services/system/disks", "services/system/volume", "services/system/media"},
		"TestMediumInBIOS":               {"image/media", "image/loader", "boot/esp", "services/system/install", "services/system/disk", "services/system/disks", "services/system/volume", "services/system/media", "boot/layout.go"},
		"TestImagesOnTheMedium":          {"image/media", "image/oci", "boot/source", "boot/medium.go", "services/kubernetes/containerd", "tools/gbctl/imagebundle", "tools/gbctl/images*.go"},
		"TestClusterFromTheNetwork":      {"qemu/machines.go", "qemu/vm", "image/media", "tools/gbctl/netboot", "boot/source"},
		"TestNetworkInBIOS":              {"tools/gbctl/netboot", "tools/gbctl/media_serve.go", "image/loader", "boot/source"},
		"TestNetworkInUEFI":              {"tools/gbctl/netboot", "tools/gbctl/media_serve.go", "image/loader"},
		"TestHTTPBootOfUEFI":             {"tools/gbctl/netboot", "tools/gbctl/media_serve.go"},
		"TestDiskImage":                  {"image/media", "boot/esp", "boot/source", "services/system/disk", "services/system/disks", "services/system/volume", "services/system/media", "services/system/slots"},
		"TestDiskImageWithConfiguration": {"image/media", "boot/source", "boot/medium.go"},
		"TestExtensions":                 {"image/customize", "image/extensions", "boot/extension", "services/kubernetes/extension", "services/system/udev", "services/system/sysctl"},
		"TestS200CustomizedByDocker":     {"image/customize", "image/installer", "image/squashfs", "image/sbom", "image/program", "services/system/disk", "services/system/disks", "services/system/volume", "services/system/media"},
		"TestSystemWithoutNetwork":       {"services/system/slots", "boot/slots.go", "boot/esp", "init/watchdog.go", "services/operations/rollout", "tools/gbctl/power.go"},
	}},
	"qemu/e2e/members": {All: []string{
		"services/kubernetes/etcd", "services/kubernetes/vip", "services/operations/lifecycle", "tools/gbctl/etcd.go", "tools/gbctl/reset.go",
	}},
	"qemu/e2e/mirror": {All: []string{
		"image/oci", "image/components", "services/kubernetes/containerd", "qemu/network", "tools/gbctl/imagebundle", "tools/gbctl/images*.go", "config/images.go",
	}},
	"qemu/e2e/onenode": {Tests: map[string][]string{
		// It runs with every change: so it also covers what no long test was written for.
		"TestOneNodeInContainer": {
			"services/*.go", "services/core", "services/kubernetes", "services/system/logship", "services/system/netcheck", "services/system/outbound", "init", "config", "boot/*.go", "boot/untrusted",
			"image/*.go", "image/cache", "image/components", "image/debian", "image/oci", "image/program", "image/progress", "image/rootfs",
			"qemu/*.go", "qemu/container", "qemu/exit", "qemu/osthread", "tools/devcluster", "tools/gbctl/*.go", "go.mod", "go.sum",
		},
		"TestDoctor":                  {"services/operations/doctor"},
		"TestHealthTellsOfKubernetes": {"services/kubernetes/kubelet", "services/front/api", "tools/gbctl/health.go"},
		"TestKilledServicesComeBack":  {"services/core/dag", "services/core/process", "services/kubernetes/containerd"},
		"TestImageFromTheFirstBoot":   {"services/kubernetes/kubelet"},
		"TestWaitsForBootstrap":       {"services/operations/doctor"},
		"TestOldEtcdData":             {"services/kubernetes/etcd"},
		"TestOneNodeInQEMU":           {"init", "image/initramfs", "image/squashfs", "kernel", "qemu/vm", "services/kubernetes/kubelet"},
	}},
	"qemu/e2e/operation": {All: []string{"services/core/operation", "services/operations/lifecycle", "services/operations/rollout", "tools/gbctl/operation.go", "tools/gbctl/follow.go"}},
	"qemu/e2e/partition": {All: []string{"services/kubernetes/etcd", "services/kubernetes/balancer", "services/kubernetes/controlplane"}},
	"qemu/e2e/policies":  {All: []string{"services/kubernetes/firewall", "services/kubernetes/controlplane/bootstrap_manifests", "image/components/kube-network-policies", "kernel"}},
	"qemu/e2e/readdress": {All: []string{"services/operations/readdress", "services/kubernetes/etcd", "services/system/network", "services/kubernetes/secrets", "tools/gbctl/kubernetes.go"}},
	"qemu/e2e/reboot":    {All: []string{"services/operations/lifecycle", "services/kubernetes/etcd", "services/kubernetes/containerd", "init"}},
	"qemu/e2e/registries": {All: []string{"services/kubernetes/containerd"}, Tests: map[string][]string{
		"TestS133Caches":         {"qemu/network", "image/oci"},
		"TestRegistryOfAnAirGap": {"config/images.go", "image/oci"},
		"TestBrokenRegistries":   {"services/kubernetes/kubelet"},
		"TestSignedImages":       {"services/kubernetes/kubelet", "services/kubernetes/etcd"},
	}},
	"qemu/e2e/renamed": {All: []string{"services/kubernetes/roster", "services/kubernetes/kubelet", "services/front/trustd", "services/operations/doctor"}},
	"qemu/e2e/reset":   {All: []string{"services/operations/lifecycle", "services/kubernetes/etcd", "services/system/disk", "services/system/disks", "services/system/volume", "services/kubernetes/controlplane", "tools/gbctl/reset.go"}},
	"qemu/e2e/rolling": {All: []string{"services/operations/upgradek8s", "services/operations/rollout", "services/kubernetes/kubelet"}},
	"qemu/e2e/rotate":  {All: []string{"services/operations/rotateca", "services/operations/rollout", "services/kubernetes/secrets", "config/pki", "tools/gbctl/rotateca.go"}},
	"qemu/e2e/scale":   {All: []string{"services/kubernetes/etcd", "services/kubernetes/peers", "services/operations/lifecycle"}},
	"qemu/e2e/stale":   {All: []string{"services/kubernetes/etcd", "services/kubernetes/peers", "services/operations/doctor"}},
	"qemu/e2e/story": {Tests: map[string][]string{
		"TestStoryInContainers":     {"tools/devcluster", "tools/gbctl/cluster*.go", "tools/gbctl/health.go", "tools/gbctl/reset.go", "services/operations/doctor", "services/operations/lifecycle", "services/build.go"},
		"TestStoryOfAMachine":       {"image/media", "tools/gbctl/media.go", "tools/gbctl/gen*.go", "tools/gbctl/apply.go", "tools/gbctl/kubeconfig.go", "services/system/install", "services/operations/lifecycle"},
		"TestReleaseIsTheSameTwice": {"image", "kernel", "go.mod", "go.sum"},
	}},
	"qemu/e2e/threenodes": {All: []string{"services/kubernetes/etcd", "services/kubernetes/peers"}, Tests: map[string][]string{
		"TestOneCommandKeepsTheQuorum": {"services/operations/rollout", "services/system/configuration", "tools/gbctl/services.go"},
		"TestRecoverFromSnapshot":      {"tools/gbctl/etcd.go", "tools/gbctl/bootstrap.go"},
	}},
	"qemu/e2e/upgrade": {All: []string{
		"services/operations/upgradek8s", "services/operations/convertk8s", "services/operations/rollout", "qemu/selfhosted", "tools/gbctl/kubernetes.go",
	}},
	"qemu/e2e/versions": {
		All: []string{"services/operations/upgradek8s", "services/operations/rollout", "image/components/kubernetes*/*"},
		Tests: map[string][]string{
			"TestQ16OtherKubernetes":   {"config/images.go", "services/kubernetes/controlplane", "services/kubernetes/kubelet", "tools/gbctl/kubernetes.go"},
			"TestUpgradeUnderLoad":     {"services/kubernetes/controlplane", "services/kubernetes/kubelet"},
			"TestUpgradeIsInterrupted": {"services/core/operation", "tools/gbctl/follow.go"},
		},
	},
	"qemu/e2e/vip":    {All: []string{"services/kubernetes/vip", "services/system/neighbor", "services/system/network", "services/kubernetes/etcd"}},
	"qemu/e2e/worker": {All: []string{"services/kubernetes/roster", "services/front", "services/kubernetes/kubelet", "services/kubernetes/secrets", "services/system/network", "services/system/resolver", "config/generate.go"}},

	// Tests of one service with real peers, without a node.
	"services/kubernetes/vip":        {All: []string{"services/kubernetes/vip", "services/system/neighbor"}},
	"services/operations/upgradek8s": {All: []string{"services/operations/upgradek8s", "image/components/kubernetes*/*"}},
}

// Without are packages that no end-to-end test covers: unit tests are their evidence.
var Without = []string{
	// only tests use these
	"api/client/faultyserver", "config/fuzzdata", "services/operations/operationtest", "qemu/container/snapshot",
	"qemu/e2e", "tools/testing", "tools/architecture", "tools/generate", "tools/dev", "tools/release", "tools/docs", "tools/kms", "tools/version", "image/version",
}
