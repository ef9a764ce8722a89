/*
 * System 5 on Linux, as a module: the kernel maps memory for itself, repeatedly. Each call is
 * between marks. `bindery-kernel` runs the same operations when its command line has
 * `workload=kernel-map`.
 *
 * All of the work is done while the module is loaded: insmod returns when it is finished, and fails
 * if something was refused.
 */
#include <linux/delay.h>
#include <linux/init.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/vmalloc.h>

#include "mark.h"

#define SIZE (1UL << 20)
#define PAGES (SIZE / PAGE_SIZE)
#define LARGE_SIZE (16 * SIZE)

#define TIMES 100
#define LARGE_TIMES 10

/* These machines have no memory and no device there, and nothing accesses it. */
#define DEVICE 0x300000000ULL
#define OFFSET (64UL << 10)

/*
 * Work that Linux has deferred (frees by RCU, invalidations of many vfree at once) is done
 * before the next operation is measured.
 */
#define SETTLE_MILLISECONDS 50

/*
 * Maps and unmaps once to begin with, then `times` times between marks. A phase's number is part of
 * an instruction, so this is no function. Leaves the function that it is used in with an error, if
 * a mapping is refused.
 */
#define MAP_AND_UNMAP(times, phase_of_map, map, phase_of_unmap, unmap)                             \
    do {                                                                                           \
        void *mapped = (map);                                                                      \
        if (mapped)                                                                                \
            unmap(mapped);                                                                         \
        msleep(SETTLE_MILLISECONDS);                                                               \
        for (unsigned int i = 0; mapped && i < (times); i++) {                                     \
            MARK_BEGIN(phase_of_map);                                                              \
            mapped = (map);                                                                        \
            MARK_END(phase_of_map);                                                                \
            if (!mapped)                                                                           \
                break;                                                                             \
            MARK_BEGIN(phase_of_unmap);                                                            \
            unmap(mapped);                                                                         \
            MARK_END(phase_of_unmap);                                                              \
        }                                                                                          \
        if (!mapped) {                                                                             \
            pr_err("kernel_map: refused: " #map "\n");                                             \
            return -ENOMEM;                                                                        \
        }                                                                                          \
    } while (0)

/* The pages that vmap is given, and those between them that keep them from being neighbors. */
static struct page *pages[PAGES];
static struct page *between[PAGES];

static void free_pages_of(struct page **list, unsigned int order)
{
    for (unsigned int i = 0; i < PAGES; i += 1U << order) {
        if (list[i])
            __free_pages(list[i], order);
        list[i] = NULL;
    }
}

/* Every second one of many single pages. */
static int allocate_scattered(void)
{
    bool complete = true;
    for (unsigned int i = 0; i < PAGES; i++) {
        pages[i] = alloc_page(GFP_KERNEL);
        between[i] = alloc_page(GFP_KERNEL);
        complete = complete && pages[i] && between[i];
    }
    free_pages_of(between, 0);
    if (complete)
        return 0;
    free_pages_of(pages, 0);
    return -ENOMEM;
}

static int allocate_blocks(unsigned int order)
{
    for (unsigned int i = 0; i < PAGES; i += 1U << order) {
        struct page *block = alloc_pages(GFP_KERNEL | __GFP_COMP, order);
        for (unsigned int page = 0; page < 1U << order; page++)
            pages[i + page] = block ? block + page : NULL;
        if (!block) {
            free_pages_of(pages, order);
            return -ENOMEM;
        }
    }
    return 0;
}

static void *map_pages(void)
{
    return vmap(pages, PAGES, VM_MAP, PAGE_KERNEL);
}

static void *map_device(phys_addr_t address)
{
    return (void __force *)ioremap(address, SIZE);
}

static void unmap_device(void *mapped)
{
    iounmap((void __iomem __force *)mapped);
}

static int measure_vmalloc(void)
{
    MAP_AND_UNMAP(TIMES, PHASE_VMALLOC, vmalloc(SIZE), PHASE_VFREE, vfree);
    MAP_AND_UNMAP(TIMES, PHASE_VMALLOC_HUGE, vmalloc_huge(SIZE, GFP_KERNEL), PHASE_VFREE_HUGE,
                  vfree);
    MAP_AND_UNMAP(LARGE_TIMES, PHASE_VMALLOC_HUGE_16M, vmalloc_huge(LARGE_SIZE, GFP_KERNEL),
                  PHASE_VFREE_HUGE_16M, vfree);
    return 0;
}

static int measure_vmap(void)
{
    MAP_AND_UNMAP(TIMES, PHASE_VMAP, map_pages(), PHASE_VUNMAP, vunmap);
    return 0;
}

static int measure_vmap_order_4(void)
{
    MAP_AND_UNMAP(TIMES, PHASE_VMAP_ORDER_4, map_pages(), PHASE_VUNMAP_ORDER_4, vunmap);
    return 0;
}

static int measure_vmap_order_8(void)
{
    MAP_AND_UNMAP(TIMES, PHASE_VMAP_ORDER_8, map_pages(), PHASE_VUNMAP_ORDER_8, vunmap);
    return 0;
}

static int measure_ioremap(void)
{
    MAP_AND_UNMAP(TIMES, PHASE_IOREMAP, map_device(DEVICE), PHASE_IOUNMAP, unmap_device);
    MAP_AND_UNMAP(TIMES, PHASE_IOREMAP_OFF_64K, map_device(DEVICE + OFFSET), PHASE_IOUNMAP_OFF_64K,
                  unmap_device);
    return 0;
}

/* Runs `measure` with pages in blocks of this order, or with scattered ones. */
static int with_pages(unsigned int order, int (*measure)(void))
{
    int error = order == 0 ? allocate_scattered() : allocate_blocks(order);
    if (error)
        return error;
    error = measure();
    free_pages_of(pages, order);
    return error;
}

static int __init kernel_map_init(void)
{
    int error = measure_vmalloc();
    error = error ?: with_pages(0, measure_vmap);
    error = error ?: with_pages(4, measure_vmap_order_4);
    error = error ?: with_pages(8, measure_vmap_order_8);
    return error ?: measure_ioremap();
}

module_init(kernel_map_init);
MODULE_DESCRIPTION("System 5 of Bindery's workloads: mappings of the kernel");
MODULE_LICENSE("Dual MIT/GPL");
