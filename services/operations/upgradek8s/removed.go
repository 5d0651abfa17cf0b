package upgradek8s

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// With a feature gate that it doesn't know, or a gate that it doesn't allow to
// change, a component doesn't start. The tables below have what each minor version took
// away, by the versions in the tables of feature gates of v1.35.4, v1.36.3 and v1.37.2; these have removed no flag.
// A test compares them with the programs.

// removedGates are unknown from that version on.
var removedGates = map[int]string{
	36: `CSIMigrationPortworx HonorPVReclaimPolicy InPlacePodVerticalScalingAllocatedStatus InTreePluginPortworxUnregister MemoryManager
		ServiceTrafficDistribution StructuredAuthorizationConfiguration TopologyAwareHints WatchFromStorageWithoutResourceVersion`,
	37: `APIServerTracing AnonymousAuthConfigurableEndpoints AnyVolumeDataSource AuthorizeNodeWithSelectors AuthorizeWithSelectors BtreeWatchCache
		ConsistentListFromCache GangScheduling JobBackoffLimitPerIndex JobPodReplacementPolicy JobSuccessPolicy LogarithmicScaleDown
		OrderedNamespaceDeletion PodLifecycleSleepAction PodLifecycleSleepActionAllowZero PreventStaticPodAPIReferences RelaxedDNSSearchValidation
		ResilientWatchCacheInitialization RetryGenerateName SchedulerQueueingHints SidecarContainers StreamingCollectionEncodingToJSON
		StreamingCollectionEncodingToProtobuf StructuredAuthenticationConfiguration WorkloadAwarePreemption`,
}

// lockedGates have only this value from that version on.
var lockedGates = map[int]string{
	36: `CSIServiceAccountTokenSecrets=true DRAAdminAccess=true DeclarativeValidation=true DisableNodeKubeProxyVersion=true
		ExternalServiceAccountTokenSigner=true GitRepoVolumeDriver=false ImageVolume=true InOrderInformers=true KubeletFineGrainedAuthz=true KubeletPSI=true
		KubeletPodResourcesDynamicResources=true KubeletPodResourcesGet=true MutableCSINodeAllocatableCount=true NodeLogQuery=true ProcMountType=true
		SELinuxChangePolicy=true SELinuxMountReadWriteOncePod=true SeparateCacheWatchRPC=false TopologyManagerPolicyOptions=true
		UserNamespacesSupport=true VolumeAttributesClass=true`,
	37: `DRAExtendedResource=true DRAPrioritizedList=true DRAResourceClaimDeviceStatus=true DeclarativeValidationTakeover=false
		DisableCPUQuotaWithExclusiveCPUs=true HPAConfigurableTolerance=true HostnameOverride=true InPlacePodVerticalScalingInitContainers=true
		NodeDeclaredFeatures=true PLEGOnDemandRelist=true PodReadyToStartContainersCondition=true RelaxedServiceNameValidation=true
		WatchCacheInitializationPostStartHook=true`,
}

// featureGates is the flag with the gates: A=true,B=false.
const featureGates = "feature-gates"

// argsOf reads the extraArgs of each component from the configuration of a node.
func argsOf(config kubeclient.Object) map[string]map[string]string {
	all := map[string]map[string]string{}
	for _, c := range components {
		args, _ := config.At(argsPath(c)...).(map[string]any)
		all[c.name] = map[string]string{}
		for flag, value := range args {
			all[c.name][strings.ReplaceAll(flag, "_", "-")] = fmt.Sprint(value)
		}
	}
	return all
}

func argsPath(c component) []string { return append(slices.Clone(c.path[:len(c.path)-1]), "extraArgs") }

// removed are the settings of the node with which a component of the new version wouldn't
// start.
func (s state) removed(a Arguments) (all []string) {
	for _, c := range components {
		if c.name == kubelet.name && a.NoKubelet || c.name != kubelet.name && !s.ControlPlane {
			continue
		}
		args := s.args[c.name]
		for version := minor(a.From) + 1; version <= minor(a.To); version++ {
			refuse := func(what, why string) {
				all = append(all, fmt.Sprintf("%s doesn't start with %s of %s: %s in v1.%d; remove it from the configuration first, by `gbctl patch mc`",
					c.name, what, strings.Join(argsPath(c), "."), why, version))
			}
			gates := parseGates(args[featureGates])
			for _, gate := range slices.Sorted(maps.Keys(gates)) {
				if slices.Contains(strings.Fields(removedGates[version]), gate) {
					refuse("the feature gate "+gate, "Kubernetes has removed it")
				}
				for value, other := range map[string]string{"true": "false", "false": "true"} {
					if gates[gate] == value && slices.Contains(strings.Fields(lockedGates[version]), gate+"="+other) {
						refuse("the feature gate "+gate+"="+value, "it is always "+other)
					}
				}
			}
		}
	}
	return all
}

// parseGates reads A=true,kube:B=false, or a list of such texts as it is printed.
func parseGates(text string) map[string]string {
	gates := map[string]string{}
	for _, pair := range strings.FieldsFunc(text, func(c rune) bool { return strings.ContainsRune("[, ]", c) }) {
		name, value, found := strings.Cut(pair, "=")
		if found {
			gates[name[strings.LastIndexByte(name, ':')+1:]] = strings.ToLower(value)
		}
	}
	return gates
}
